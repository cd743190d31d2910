// What runs without Python per tensor: what a call does once per tensor, and the node of autograd's graph that stands for a
// compiled or graphed function. fast.py says what each function does; native.py compiles this.
//
// torch/csrc/autograd/python_variable.h takes 20 s to compile. The few things that are needed of it are declared here;
// native.py checks that tensors are laid out so before it loads this.

#define AT_PER_OPERATOR_HEADERS  // half the time to compile
#include <Python.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_ops.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#define HAS_CREATION_HOOKS
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

// Source: torch/csrc/autograd/python_variable.h, torch/csrc/Exceptions.h, torch/csrc/Dtype.h and
// torch/csrc/DynamicTypes.h, 2.11 to 2.15.
struct PyTensor {
  PyObject_HEAD
  at::Tensor cdata;
};
extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(at::TensorBase&& var);
struct THPDtype;
namespace torch {
void translate_exception_to_python(const std::exception_ptr&);
THPDtype* getTHPDtype(at::ScalarType);
}  // namespace torch
struct __attribute__((visibility("default"))) python_error : public std::exception {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  std::string message = "python_error";

  python_error() { PyErr_Fetch(&type, &value, &traceback); }  // with the GIL, and an error set
  python_error(const python_error& other)
      : type(other.type), value(other.value), traceback(other.traceback), message(other.message) {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_XINCREF(type);
    Py_XINCREF(value);
    Py_XINCREF(traceback);
    PyGILState_Release(state);
  }
  ~python_error() override {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    PyGILState_Release(state);
  }
  const char* what() const noexcept override { return message.c_str(); }
};
namespace torch::autograd {
// Source: torch/csrc/autograd/graph_task.h, 2.11 to 2.15.
TORCH_API bool get_current_graph_task_keep_graph();
}  // namespace torch::autograd

namespace {

namespace impl = torch::autograd::impl;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(Edge::function);  // shared_ptr in torch 2.11, intrusive_ptr in 2.13

struct WithGIL {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGIL() { PyGILState_Release(state); }
};
struct PythonErrorSet {};
struct NoGIL {
  PyThreadState* state = PyEval_SaveThread();
  ~NoGIL() { PyEval_RestoreThread(state); }
};

[[noreturn]] void fail(PyObject* type, const char* message) {
  PyErr_SetString(type, message);
  throw PythonErrorSet();
}

struct Owned {  // a new reference, dropped unless it is released
  PyObject* object;
  explicit Owned(PyObject* o) : object(o) {
    if (o == nullptr) throw PythonErrorSet();
  }
  ~Owned() { Py_XDECREF(object); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  PyObject* release() { return std::exchange(object, nullptr); }
};

const at::Tensor& tensor_of(PyObject* object) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != THPVariableClass && type != ParameterClass) {
    const int is_tensor = PyObject_IsInstance(object, THPVariableClass);
    if (is_tensor < 0) throw PythonErrorSet();
    if (is_tensor == 0) fail(PyExc_TypeError, "expected a tensor");
  }
  return reinterpret_cast<PyTensor*>(object)->cdata;
}

Py_ssize_t index_of(PyObject* number, Py_ssize_t length) {
  const Py_ssize_t i = PyLong_AsSsize_t(number);
  if (i == -1 && PyErr_Occurred()) throw PythonErrorSet();
  if (i < 0 || i >= length) fail(PyExc_IndexError, "position out of range");
  return i;
}

struct Items {  // of a list or a tuple
  PyObject** items;
  Py_ssize_t size;
  explicit Items(PyObject* sequence) {
    if (!PyList_Check(sequence) && !PyTuple_Check(sequence)) {
      fail(PyExc_TypeError, "expected a list or a tuple");
    }
    items = PySequence_Fast_ITEMS(sequence);
    size = PySequence_Fast_GET_SIZE(sequence);
  }
  PyObject* at(PyObject* number) const { return items[index_of(number, size)]; }
  PyObject* at(Py_ssize_t i) const {
    if (i < 0 || i >= size) fail(PyExc_IndexError, "position out of range");
    return items[i];
  }
  Py_ssize_t number(Py_ssize_t i) const {
    const Py_ssize_t found = PyLong_AsSsize_t(at(i));
    if (found == -1 && PyErr_Occurred()) throw PythonErrorSet();
    return found;
  }
};

template <class Make>
PyObject* list_of(Py_ssize_t size, Make make) {  // of what `make` returns for each position: new references
  Owned list(PyList_New(size));
  for (Py_ssize_t k = 0; k < size; ++k) {
    PyObject* item = make(k);
    if (item == nullptr) throw PythonErrorSet();
    PyList_SET_ITEM(list.object, k, item);
  }
  return list.release();
}

PyObject* bytes_of(const std::vector<int64_t>& numbers) {
  const auto* bytes = reinterpret_cast<const char*>(numbers.data());
  return PyBytes_FromStringAndSize(bytes, static_cast<Py_ssize_t>(numbers.size() * sizeof(int64_t)));
}

struct Numbers {  // that bytes stand for
  const int64_t *begin, *end;
  Py_ssize_t size;
  explicit Numbers(PyObject* bytes) {
    if (!PyBytes_Check(bytes)) fail(PyExc_TypeError, "expected bytes");
    begin = reinterpret_cast<const int64_t*>(PyBytes_AS_STRING(bytes));
    size = PyBytes_GET_SIZE(bytes) / static_cast<Py_ssize_t>(sizeof(int64_t));
    end = begin + size;
  }
};

template <int64_t (*number_of)(const at::Tensor&)>
PyObject* numbers(PyObject* const* args) {
  const Items values(args[0]);
  const Items positions(args[1]);
  Owned key(PyBytes_FromStringAndSize(nullptr, positions.size * sizeof(int64_t)));
  auto* out = reinterpret_cast<int64_t*>(PyBytes_AS_STRING(key.object));
  for (Py_ssize_t k = 0; k < positions.size; ++k) {
    out[k] = number_of(tensor_of(values.at(positions.items[k])));
  }
  return key.release();
}

int64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.const_data_ptr());
}

int64_t storage_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.storage().unsafeGetStorageImpl());
}

// static_key(args, positions): addresses of tensors, as 64-bit integers.
constexpr auto static_key = numbers<address_of>;
// storage_key(args, positions): identities of their storages (UntypedStorage._cdata), likewise.
constexpr auto storage_key = numbers<storage_of>;

// Positions of tensors by identity: the first one of each.
struct Firsts {
  std::vector<std::pair<const void*, int64_t>> slots;
  explicit Firsts(Py_ssize_t n) {
    size_t size = 4;
    while (size < 2 * static_cast<size_t>(n)) size *= 2;
    slots.resize(size, {nullptr, 0});
  }
  int64_t of(const void* object, int64_t position) {
    const size_t mask = slots.size() - 1;
    for (size_t k = (reinterpret_cast<size_t>(object) >> 4) * 0x9E3779B97F4A7C15u >> 20;; ++k) {
      auto& slot = slots[k & mask];
      if (slot.first == nullptr) slot = {object, position};
      if (slot.first == object) return slot.second;
    }
  }
};

// layouts(tensors): what a graph that reads tensors where they lie has in it, as 64-bit integers. For each
// tensor: number of dimensions, address, position of the first that is the same object, id of its dtype,
// whether it is conjugated or negated, sizes, strides.
PyObject* layouts(PyObject* const* args) {
  const Items values(args[0]);
  Firsts firsts(values.size);
  std::vector<int64_t> out;
  out.reserve(8 * values.size);
  for (Py_ssize_t k = 0; k < values.size; ++k) {
    const at::Tensor& tensor = tensor_of(values.items[k]);
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    out.push_back(static_cast<int64_t>(sizes.size()));
    out.push_back(reinterpret_cast<int64_t>(tensor.const_data_ptr()));
    out.push_back(firsts.of(values.items[k], k));
    out.push_back(reinterpret_cast<int64_t>(torch::getTHPDtype(tensor.scalar_type())));
    out.push_back(tensor.is_conj() + 2 * tensor.is_neg());
    out.insert(out.end(), sizes.begin(), sizes.end());
    out.insert(out.end(), strides.begin(), strides.end());
  }
  return bytes_of(out);
}

// geometry(values, positions): number of dimensions, sizes and strides of each tensor, -1 for what is none.
PyObject* geometry(PyObject* const* args) {
  const Items values(args[0]), positions(args[1]);
  std::vector<int64_t> out;
  out.reserve(9 * positions.size);
  for (Py_ssize_t k = 0; k < positions.size; ++k) {
    PyObject* value = values.at(positions.items[k]);
    const int is_tensor = PyObject_IsInstance(value, THPVariableClass);
    if (is_tensor < 0) throw PythonErrorSet();
    if (!is_tensor) {
      out.push_back(-1);
      continue;
    }
    const at::Tensor& tensor = tensor_of(value);
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    out.push_back(static_cast<int64_t>(sizes.size()));
    out.insert(out.end(), sizes.begin(), sizes.end());
    out.insert(out.end(), strides.begin(), strides.end());
  }
  return bytes_of(out);
}

// note_written(tensors): counts a write of each, as an operator would; inference tensors are left out.
PyObject* note_written(PyObject* const* args) {
  const Items values(args[0]);
  for (Py_ssize_t k = 0; k < values.size; ++k) {
    const at::Tensor& tensor = tensor_of(values.items[k]);
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
  Py_RETURN_NONE;
}

// requiring_grad(tensors): which tensors require grad, a byte each.
PyObject* requiring_grad(PyObject* const* args) {
  const Items values(args[0]);
  Owned out(PyBytes_FromStringAndSize(nullptr, values.size));
  char* flags = PyBytes_AS_STRING(out.object);
  for (Py_ssize_t k = 0; k < values.size; ++k) {
    flags[k] = static_cast<char>(tensor_of(values.items[k]).requires_grad());
  }
  return out.release();
}

// unchanged(mappings, keys, values, holders, sizes): whether each mapping has the same object for its key as
// before. ... stands for nothing. The sizes of other containers, the holders, are compared, too: 64-bit
// integers.
PyObject* unchanged(PyObject* const* args) {
  const Items mappings(args[0]), keys(args[1]), values(args[2]), holders(args[3]);
  const Numbers sizes(args[4]);
  if (mappings.size != keys.size || keys.size != values.size || holders.size != sizes.size) {
    fail(PyExc_ValueError, "as many values as keys expected");
  }
  for (Py_ssize_t k = 0; k < holders.size; ++k) {
    PyObject* holder = holders.items[k];
    const Py_ssize_t size = PyDict_Check(holder) ? PyDict_GET_SIZE(holder) : PyObject_Size(holder);
    if (size < 0) throw PythonErrorSet();
    if (size != sizes.begin[k]) Py_RETURN_FALSE;
  }
  for (Py_ssize_t k = 0; k < keys.size; ++k) {
    PyObject* found = nullptr;
    if (PyDict_CheckExact(mappings.items[k])) {
      found = PyDict_GetItemWithError(mappings.items[k], keys.items[k]);
      if (found == nullptr && PyErr_Occurred()) throw PythonErrorSet();
    } else {
      found = PyObject_GetItem(mappings.items[k], keys.items[k]);
      if (found == nullptr && !PyErr_ExceptionMatches(PyExc_KeyError)) throw PythonErrorSet();
      PyErr_Clear();
      Py_XDECREF(found);
    }
    if ((found != nullptr ? found : Py_Ellipsis) != values.items[k]) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// members(mappings, keys): what each mapping has for its key; a KeyError where one has nothing.
PyObject* members(PyObject* const* args) {
  const Items mappings(args[0]), keys(args[1]);
  if (mappings.size != keys.size) fail(PyExc_ValueError, "as many mappings as keys expected");
  return list_of(keys.size, [&](Py_ssize_t k) -> PyObject* {
    return PyObject_GetItem(mappings.items[k], keys.items[k]);
  });
}

// References to a storage in C++ and, since its Python object is one of these whoever holds that, to the latter.
size_t users_of(c10::StorageImpl* storage) {
  PyObject* object = storage->pyobj_slot()->load_pyobj();
  return c10::raw::intrusive_ptr::use_count(storage) + (object ? Py_REFCNT(object) : 0);
}

// in_transform(): whether tensors may come without memory of their own: inside vmap, torch.func.grad and their
// like. Batched gradients (is_grads_batched=True, jacobian(vectorize=True)) come from a vmap that is no
// functorch level.
PyObject* in_transform(PyObject* const*) {
  const c10::DispatchKeySet transforms(
      {c10::DispatchKey::VmapMode, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms)) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

// watched(storages): what any_held compares storages with; to be asked for while nobody else holds them.
PyObject* watched(PyObject* const* args) {
  const Items storages(args[0]);
  std::vector<int64_t> out;
  out.reserve(3 * storages.size);
  for (Py_ssize_t k = 0; k < storages.size; ++k) {
    const Owned address(PyObject_GetAttrString(storages.items[k], "_cdata"));
    auto* storage = static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(address.object));
    if (storage == nullptr) throw PythonErrorSet();
    out.push_back(reinterpret_cast<int64_t>(storage));
    out.push_back(reinterpret_cast<int64_t>(storage->data()));
    out.push_back(static_cast<int64_t>(users_of(storage)));
  }
  return bytes_of(out);
}

struct Watched {  // storages, where they lay and how many users they had
  struct Entry {
    int64_t storage, address, users;
    c10::StorageImpl* impl() const { return reinterpret_cast<c10::StorageImpl*>(storage); }
  };
  const Entry* entries;
  Py_ssize_t size;
  explicit Watched(PyObject* const* args) {
    const Numbers numbers(args[1]);
    entries = reinterpret_cast<const Entry*>(numbers.begin);
    size = Items(args[0]).size;
    if (3 * size != numbers.size) fail(PyExc_ValueError, "as many counts as storages expected");
  }
  // Since the last call others have used the cache: what is read next is on its way while this is compared.
  bool is_held(Py_ssize_t k) const {
    if (k + 16 < size) __builtin_prefetch(entries[k + 16].impl());
    if (k + 8 < size) __builtin_prefetch(entries[k + 8].impl()->pyobj_slot()->load_pyobj());
    const Entry& entry = entries[k];
    return users_of(entry.impl()) != static_cast<size_t>(entry.users) ||
           entry.impl()->data() != reinterpret_cast<const void*>(entry.address);
  }
};

// any_held(*watch): whether some storage has another number of users than it should, or lies elsewhere. See
// Watch.
PyObject* any_held(PyObject* const* args) {
  const Watched watched(args);
  for (Py_ssize_t k = 0; k < watched.size; ++k) {
    if (watched.is_held(k)) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

// held(*watch): which storages any_held asks for.
PyObject* held(PyObject* const* args) {
  const Watched watched(args);
  Owned found(PyList_New(0));
  for (Py_ssize_t k = 0; k < watched.size; ++k) {
    if (!watched.is_held(k)) continue;
    const Owned number(PyLong_FromSsize_t(k));
    if (PyList_Append(found.object, number.object) < 0) throw PythonErrorSet();
  }
  return found.release();
}

// any_held_among(entries, among): whether some storage of certain ones is held. An entry is a number, and
// something with a watch; among has positions of storages by that number. Entries of other numbers are left
// out.
PyObject* any_held_among(PyObject* const* args) {
  static PyObject* const name = PyUnicode_InternFromString("watch");
  const Items entries(args[0]);
  if (!PyDict_Check(args[1])) fail(PyExc_TypeError, "expected a dict");
  for (Py_ssize_t k = 0; k < entries.size; ++k) {
    const Items entry(entries.items[k]);
    if (entry.size < 2) fail(PyExc_ValueError, "expected a number and a memory");
    PyObject* positions = PyDict_GetItemWithError(args[1], entry.items[0]);
    if (positions == nullptr) {
      if (PyErr_Occurred()) throw PythonErrorSet();
      continue;
    }
    const Items among(positions);
    if (among.size == 0) continue;
    const Owned watch(PyObject_GetAttr(entry.items[1], name));
    const Items parts(watch.object);
    if (parts.size != 2) fail(PyExc_ValueError, "expected storages and their counts");
    const Watched watched(parts.items);
    for (Py_ssize_t n = 0; n < among.size; ++n) {
      if (watched.is_held(index_of(among.items[n], watched.size))) Py_RETURN_TRUE;
    }
  }
  Py_RETURN_FALSE;
}

// stand_in(address, num_bytes, like): memory at an address on the device of like, as bytes that may be resized.
// Lifetime: owns nothing; the caller keeps the memory alive.
PyObject* stand_in(PyObject* const* args) {
  void* address = PyLong_AsVoidPtr(args[0]);
  const size_t bytes = PyLong_AsSize_t(args[1]);
  if (PyErr_Occurred()) throw PythonErrorSet();
  const c10::Device device = tensor_of(args[2]).device();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(address, device),
      c10::GetAllocator(device.type()), true);
  const c10::DispatchKeySet keys(c10::computeDispatchKey(at::kByte, at::kStrided, device));
  at::Tensor out = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(std::move(storage)), keys, caffe2::TypeMeta::Make<uint8_t>());
  out.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(bytes)});
  return THPVariable_Wrap(std::move(out));
}

c10::intrusive_ptr<at::TensorImpl> detached(const at::Tensor& tensor) {
  at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->shallow_copy_and_detach(impl->version_counter(), true);
}

// With a version counter of its own, as `Tensor.data`: what callers write to one call's output concerns no other's.
c10::intrusive_ptr<at::TensorImpl> renewed(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
}

// aliases(tensors): data of each. Lifetime: they hold the same storages, and have version counters of their
// own.
PyObject* aliases(PyObject* const* args) {
  const Items tensors(args[0]);
  return list_of(tensors.size, [&](Py_ssize_t k) {
    return THPVariable_Wrap(at::Tensor(renewed(tensor_of(tensors.items[k]))));
  });
}

// exclusive(args, positions, counts): whether nobody but the list args holds the tensors at positions, and
// their storages have as many users as given.
PyObject* exclusive(PyObject* const* args) {
  const Items values(args[0]);
  const Items positions(args[1]);
  const Items expected(args[2]);
  if (positions.size != expected.size) {
    fail(PyExc_ValueError, "as many counts as positions expected");
  }
  for (Py_ssize_t k = 0; k < positions.size; ++k) {
    PyObject* object = values.at(positions.items[k]);
    const at::Tensor& tensor = tensor_of(object);
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto count = PyLong_AsUnsignedLong(expected.items[k]);
    if (PyErr_Occurred()) throw PythonErrorSet();
    if (Py_REFCNT(object) != 1 || tensor.use_count() != 1 ||
        users_of(storage) != count) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

// swap_storages(first, second): exchange the memory under each pair, for everybody who holds their storages.
PyObject* swap_storages(PyObject* const* args) {
  const Items first(args[0]);
  const Items second(args[1]);
  if (first.size != second.size) fail(PyExc_ValueError, "as many tensors as others expected");
  for (Py_ssize_t k = 0; k < first.size; ++k) {
    auto* a = tensor_of(first.items[k]).storage().unsafeGetStorageImpl();
    auto* b = tensor_of(second.items[k]).storage().unsafeGetStorageImpl();
    TORCH_CHECK(
        a->nbytes() == b->nbytes() && a->device() == b->device(),
        "storages of one size on one device expected");
    auto from_a = a->set_data_ptr(at::DataPtr(nullptr, a->device()));
    auto from_b = b->set_data_ptr(std::move(from_a));
    a->set_data_ptr(std::move(from_b));
  }
  Py_RETURN_NONE;
}

std::vector<int64_t> numbers_of(PyObject* tuple) {
  const Items items(tuple);
  std::vector<int64_t> out(items.size);
  for (Py_ssize_t k = 0; k < items.size; ++k) out[k] = PyLong_AsLongLong(items.items[k]);
  if (PyErr_Occurred()) throw PythonErrorSet();
  return out;
}

at::Tensor view_of(const at::Tensor& base, PyObject* spec) {
  const std::vector<int64_t> size = numbers_of(PyTuple_GET_ITEM(spec, 1));
  const std::vector<int64_t> stride = numbers_of(PyTuple_GET_ITEM(spec, 2));
  const int64_t offset = base.storage_offset() + PyLong_AsLongLong(PyTuple_GET_ITEM(spec, 3));
  if (PyErr_Occurred()) throw PythonErrorSet();
  const size_t bytes = at::detail::computeStorageNbytes(size, stride, base.itemsize(), offset);
  TORCH_CHECK(
      offset >= 0 && bytes <= base.storage().nbytes(), "view out of the bounds of its storage");
  auto impl = detached(base);
  impl->set_sizes_and_strides(size, stride, offset);
  return at::Tensor(std::move(impl));
}

// views(args, specs): parts of inputs' storages, aliases as detach() makes them.
PyObject* views(PyObject* const* args) {
  const Items values(args[0]);
  const Items specs(args[1]);
  return list_of(specs.size, [&](Py_ssize_t k) {
    PyObject* spec = specs.items[k];
    if (!PyTuple_Check(spec) || PyTuple_GET_SIZE(spec) != 4) {
      fail(PyExc_TypeError, "expected (index, size, stride, offset)");
    }
    return THPVariable_Wrap(view_of(tensor_of(values.at(PyTuple_GET_ITEM(spec, 0))), spec));
  });
}

// Plain tensors from the allocator that `like`'s memory came from: a third of the time of the dispatcher, which knows
// what others need (quantised ones are no plain TensorImpl) or refuses them.
at::Tensor new_like(const at::Tensor& like) {
  const auto dtype = like.scalar_type();
  const bool is_plain =
      like.layout() == at::kStrided && (like.is_cpu() || like.is_cuda()) && !like.is_quantized();
  c10::Allocator* allocator = is_plain ? like.storage().allocator() : nullptr;
  if (allocator == nullptr) {
    return at::_ops::empty_strided::call(
        like.sym_sizes(), like.sym_strides(), dtype, at::kStrided, like.device(), std::nullopt);
  }
  const c10::DispatchKeySet keys(c10::computeDispatchKey(dtype, at::kStrided, like.device()));
  return at::Tensor(
      at::detail::empty_strided_generic(like.sizes(), like.strides(), allocator, keys, dtype));
}

// As `COPIED_AS_THEY_ARE` in inputs.py.
bool has_copy_kernel(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

at::Tensor bits_of(const at::Tensor& tensor) {
  const auto size = tensor.itemsize();
  const auto dtype = size == 1 ? at::kByte : size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong;
  return at::_ops::view_dtype::call(tensor, dtype);
}

std::vector<at::Tensor> copied(const std::vector<at::Tensor>& sources) {
  const NoGIL no_gil;
  const at::AutoDispatchBelowAutograd below_autograd;
  const c10::OptionalDeviceGuard guard(sources[0].device());
  std::vector<at::Tensor> out;
  out.reserve(sources.size());
  for (const at::Tensor& source : sources) out.push_back(new_like(source));
  if (has_copy_kernel(sources[0].scalar_type())) {
    at::_ops::_foreach_copy_::call(out, sources, false);
    return out;
  }
  for (size_t k = 0; k < out.size(); ++k) {
    const bool as_values = sources[k].is_conj() || sources[k].is_quantized();
    at::Tensor target = as_values ? out[k] : bits_of(out[k]);
    at::_ops::copy_::call(target, as_values ? sources[k] : bits_of(sources[k]), false);
  }
  return out;
}

// copies(tensors): copies in memory of their own, on the current stream; lifetime: the caller's. The tensors
// are of one dtype and device, and none overlaps itself.
PyObject* copies(PyObject* const* args) {
  const Items tensors(args[0]);
  if (tensors.size == 0) return PyList_New(0);
  std::vector<at::Tensor> sources;
  sources.reserve(tensors.size);
  for (Py_ssize_t k = 0; k < tensors.size; ++k) sources.push_back(tensor_of(tensors.items[k]));
  std::vector<at::Tensor> results = copied(sources);
  return list_of(
      tensors.size, [&](Py_ssize_t k) { return THPVariable_Wrap(std::move(results[k])); });
}

// fits(values, likes, may_require_grad): whether values are dense tensors of the sizes, dtypes and devices of
// others. A byte for each says whether it may require grad where gradients are recorded.
PyObject* fits(PyObject* const* args) {
  const Items values(args[0]), likes(args[1]);
  if (!PyBytes_Check(args[2]) || PyBytes_GET_SIZE(args[2]) != likes.size) {
    fail(PyExc_ValueError, "as many flags as tensors expected");
  }
  const char* may_require_grad = PyBytes_AS_STRING(args[2]);
  if (values.size != likes.size) Py_RETURN_FALSE;
  const bool is_grad_enabled = c10::GradMode::is_enabled();
  for (Py_ssize_t k = 0; k < values.size; ++k) {
    const int is_tensor = PyObject_IsInstance(values.items[k], THPVariableClass);
    if (is_tensor < 0) throw PythonErrorSet();
    if (!is_tensor) Py_RETURN_FALSE;
    const at::Tensor &tensor = tensor_of(values.items[k]), &like = tensor_of(likes.items[k]);
    if (tensor.layout() != at::kStrided || tensor.unsafeGetTensorImpl()->is_nested() ||
        tensor.sizes() != like.sizes() || tensor.scalar_type() != like.scalar_type() ||
        tensor.device() != like.device() ||
        (is_grad_enabled && !may_require_grad[k] && tensor.requires_grad())) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

// put(into, positions, values): assign one value to each position.
PyObject* put(PyObject* const* args) {
  if (!PyList_Check(args[0])) fail(PyExc_TypeError, "expected a list");
  const Items positions(args[1]);
  const Owned sequence(PySequence_Fast(args[2], "expected a sequence"));
  const Items values(sequence.object);
  if (positions.size != values.size) fail(PyExc_ValueError, "as many values as positions expected");
  for (Py_ssize_t k = 0; k < positions.size; ++k) {
    const Py_ssize_t i = index_of(positions.items[k], PyList_GET_SIZE(args[0]));
    PyList_SetItem(args[0], i, Py_NewRef(values.items[k]));
  }
  Py_RETURN_NONE;
}

// ---- the node

// By value: wrapping leaves a tensor that Python knows where it is, and would keep it for as long as the backward runs.
PyObject* list_of(std::vector<at::Tensor> tensors) {
  return list_of(static_cast<Py_ssize_t>(tensors.size()), [&](Py_ssize_t k) {
    return tensors[k].defined() ? THPVariable_Wrap(std::move(tensors[k])) : Py_NewRef(Py_None);
  });
}

// Whether Python hooks were all removed: their dictionary stays, empty. The classes' type information is not exported, so
// they are told by name.
template <typename Hooks, typename Hook>
bool were_removed(const Hook& hook, const char* name) {
  return std::strcmp(typeid(hook).name(), name) == 0 && PyDict_GET_SIZE(static_cast<const Hooks&>(hook).dict) == 0;
}

bool has_tensor_hooks(const at::Tensor& parameter) {
  using torch::autograd::PyFunctionTensorPostAccGradHooks;
  using torch::autograd::PyFunctionTensorPreHook;
  for (const auto& hook : impl::hooks(parameter)) {
    if (!were_removed<PyFunctionTensorPreHook>(*hook, "N5torch8autograd23PyFunctionTensorPreHookE")) return true;
  }
  const auto& later = impl::post_acc_grad_hooks(parameter);
  constexpr const char* name = "N5torch8autograd32PyFunctionTensorPostAccGradHooksE";
  return later && !were_removed<PyFunctionTensorPostAccGradHooks>(*later, name);
}

// Whether a parameter has a gradient, or somebody notices when one is added without the node that does so.
bool is_watched(const at::Tensor& parameter) {
  const auto* meta = impl::get_autograd_meta(parameter);
  if (meta == nullptr) return false;
  if (meta->grad_.defined()) return true;
  if (!meta->requires_grad_ && !meta->grad_fn_) return false;
  if (meta->grad_fn_ || parameter.unsafeGetTensorImpl()->is_python_dispatch() ||
      parameter.grad_dtype() != parameter.scalar_type()) {
    return true;
  }
  if ((!meta->hooks_.empty() || meta->post_acc_grad_hooks_) && has_tensor_hooks(parameter)) return true;
  if (meta->grad_accumulator_.expired()) return false;
  const auto accumulator = impl::try_get_grad_accumulator(parameter);
  return accumulator && !(accumulator->pre_hooks().empty() && accumulator->post_hooks().empty() &&
                          accumulator->retains_grad_hooks().empty());
}

// are(values, positions, objects): whether the values at positions are these very objects.
PyObject* are(PyObject* const* args) {
  const Items values(args[0]), positions(args[1]), objects(args[2]);
  if (positions.size != objects.size) fail(PyExc_ValueError, "as many positions as objects expected");
  for (Py_ssize_t k = 0; k < positions.size; ++k) {
    if (values.at(positions.items[k]) != objects.items[k]) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// What `contents` walks through. No Python code runs meanwhile, so references are borrowed.
struct Walk {
  std::vector<PyObject*> objects;
  std::vector<int64_t> addresses;

  void through(PyObject* object) {
    objects.push_back(object);
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (type == THPVariableClass || type == ParameterClass) {
      const c10::TensorImpl& tensor = *reinterpret_cast<PyTensor*>(object)->cdata.unsafeGetTensorImpl();
      const c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
      addresses.push_back(storage == nullptr ? 0 : reinterpret_cast<int64_t>(storage->data()) +
          tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()));
      return;
    }
    const bool is_dict = PyDict_Check(object);
    if (!is_dict && !PyList_Check(object) && !PyTuple_Check(object)) return;
    if (Py_EnterRecursiveCall(" in containers") != 0) throw PythonErrorSet();
    const struct Leave {
      ~Leave() { Py_LeaveRecursiveCall(); }
    } leave;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; is_dict && PyDict_Next(object, &at, &key, &value);) {
      objects.push_back(key);
      through(value);
    }
    for (Py_ssize_t k = 0; !is_dict && k < PySequence_Fast_GET_SIZE(object); ++k) {
      through(PySequence_Fast_ITEMS(object)[k]);
    }
  }
};

// contents(roots, before): a list of all that is in dicts, lists and tuples, and the addresses of the plain tensors among
// it (of keys not) as 64-bit integers. before is an earlier result, or (): where nothing changed it is returned itself, and
// where the same objects are there, with its list.
PyObject* contents(PyObject* const* args) {
  const Items roots(args[0]), before(args[1]);
  Walk walk;
  if (before.size == 2) {
    walk.objects.reserve(Items(before.items[0]).size + 1);
    walk.addresses.reserve(Numbers(before.items[1]).size + 1);
  }
  for (Py_ssize_t k = 0; k < roots.size; ++k) walk.through(roots.items[k]);
  PyObject* known = nullptr;
  if (before.size == 2) {
    const Items objects(before.items[0]);
    const Numbers addresses(before.items[1]);
    if (std::equal(walk.objects.begin(), walk.objects.end(), objects.items, objects.items + objects.size)) {
      known = before.items[0];
      if (std::equal(walk.addresses.begin(), walk.addresses.end(), addresses.begin, addresses.end)) {
        return Py_NewRef(args[1]);
      }
    }
  }
  const Owned list(known != nullptr ? Py_NewRef(known) : list_of(walk.objects.size(), [&](Py_ssize_t k) {
    return Py_NewRef(walk.objects[k]);
  }));
  const Owned addresses(bytes_of(walk.addresses));
  return PyTuple_Pack(2, list.object, addresses.object);
}

// first_watched(leaves): the first that has a gradient, or whose gradient somebody would notice being made; -1
// for none.
PyObject* first_watched(PyObject* const* args) {
  const Items leaves(args[0]);
  for (Py_ssize_t k = 0; k < leaves.size; ++k) {
    if (is_watched(tensor_of(leaves.items[k]))) return PyLong_FromSsize_t(k);
  }
  return PyLong_FromLong(-1);
}

using torch::autograd::AccumulateGrad;

// The node that adds to a leaf's `.grad`, if nobody notices when it is called at once and not by autograd's engine: no
// other node leads to it, nothing is hooked on it, and the engine would call it on the same stream, none for a CPU.
AccumulateGrad* accumulator_of_one(
    const Edge& edge, const at::Tensor& gradient, at::Device device, const std::optional<c10::Stream>& stream) {
  if (!edge.is_valid() || edge.function.use_count() != 1) return nullptr;
  auto* node = dynamic_cast<AccumulateGrad*>(edge.function.get());
  if (node == nullptr || !node->pre_hooks().empty() || !node->post_hooks().empty() ||
      !node->retains_grad_hooks().empty() || !node->tensor_pre_hooks().empty() ||
      node->tensor_post_acc_grad_hooks() != nullptr) {
    return nullptr;
  }
  const at::Tensor& leaf = node->variable;
  const at::Tensor& before = leaf.grad();
  for (const at::Tensor* tensor : {&leaf, &gradient, &before}) {
    if (tensor->defined() &&
        (tensor->layout() != at::kStrided || tensor->is_nested() ||
         tensor->unsafeGetTensorImpl()->is_python_dispatch())) {
      return nullptr;
    }
  }
  const auto& expected = node->input_metadata(0);
  if (expected.device() != device || (stream && expected.stream() != *stream)) return nullptr;
  const bool fits = gradient.sizes() == leaf.sizes() && gradient.device() == leaf.device() &&
      gradient.scalar_type() == leaf.scalar_type() && leaf.grad_dtype() == leaf.scalar_type();
  return fits ? node : nullptr;
}

// Whether several leaves have a `.grad` in one place: the order counts in which gradients are added, and the engine's
// depends on how many leaves there are.
bool have_shared_grads(const edge_list& edges) {
  std::vector<const void*> places;
  for (const Edge& edge : edges) {
    const auto* accumulator = dynamic_cast<const AccumulateGrad*>(edge.function.get());
    if (accumulator == nullptr) continue;
    const at::Tensor& grad = accumulator->variable.grad();
    if (!grad.defined()) continue;
    const bool has_memory = grad.has_storage() && grad.numel() > 0 && grad.layout() == at::kStrided &&
        !grad.unsafeGetTensorImpl()->is_python_dispatch();
    places.push_back(has_memory ? grad.const_data_ptr() : grad.unsafeGetTensorImpl());
  }
  std::sort(places.begin(), places.end());
  return std::adjacent_find(places.begin(), places.end()) != places.end();
}

// Edges that a node is without as long as this lives. Whoever reads edges from Python has the GIL.
struct TakenEdges {
  NodePointer from;
  std::vector<std::pair<size_t, Edge>> edges;

  TakenEdges(NodePointer node, const std::vector<std::pair<size_t, AccumulateGrad*>>& found)
      : from(std::move(node)) {
    edges.reserve(found.size());
    WithGIL gil;
    for (const auto& [k, _] : found) edges.emplace_back(k, std::exchange(from->next_edges()[k], Edge()));
  }
  TakenEdges(const TakenEdges&) = delete;
  TakenEdges& operator=(const TakenEdges&) = delete;
  ~TakenEdges() {
    if (!Py_IsInitialized()) return;
    WithGIL gil;
    for (auto& [k, edge] : edges) from->next_edges()[k] = std::move(edge);
  }
};

// A tensor that lives as long as what it is given.
at::Tensor keeping(std::unique_ptr<TakenEdges> taken) {
  void* context = taken.get();
  at::Tensor tensor = at::for_blob(context, {0})
      .context(context, [](void* edges) { delete static_cast<TakenEdges*>(edges); })
      .options(at::TensorOptions(at::kByte))
      .make_tensor();
  taken.release();
  return tensor;
}

template <class Pointer>
Pointer owner_of(Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(node, [](auto* dead) { deleteNode(dead); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

// What gradients end in under `create_graph=True`. Autograd leaves out nodes that lead to nothing that is wanted, one
// that raises among them: so this one leads to all that the gradients depend on.
struct DoubleBackward : public Node {
  PyObject *run, *rest;  // as of the node whose gradients they are

  DoubleBackward(edge_list&& edges, PyObject* run_, PyObject* rest_)
      : Node(std::move(edges)), run(Py_NewRef(run_)), rest(Py_NewRef(rest_)) {}

  ~DoubleBackward() override {
    if (!Py_IsInitialized()) return;
    WithGIL gil;
    Py_DECREF(run);
    Py_DECREF(rest);
  }

  std::string name() const override { return "DoubleBackward"; }

  variable_list apply(variable_list&&) override {
    WithGIL gil;
    PyObject* args[] = {rest, Py_None, Py_None};
    Py_XDECREF(PyObject_Vectorcall(run, args, 3, nullptr));
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "double backward is not supported");
    throw python_error();
  }
};

struct CompiledFunctionBackward : public Node {
  PyObject* run;     // run(rest, saved, grads) -> a list with a gradient or None per input of the forward
                     // run(rest, None, None) raises
  PyObject* rest;    // what else the backward reads
  std::vector<Py_ssize_t> wanted;     // positions of the gradients that the edges get
  struct Saved {
    std::vector<SavedVariable> checked;  // for writes
    std::vector<at::Tensor> unchecked;
  };
  std::shared_ptr<Saved> saved;       // none once it was released; hooks that unpack let other threads do so meanwhile
  std::atomic<size_t> num_calls{0};   // a graph that is retained may be gone through by two threads at the same time
  std::string shown;                  // what it is called
  bool materializes;                  // whether gradients that are undefined are zeros for `run`
  bool runs_once;                     // whether `run` raises when it is called again

  CompiledFunctionBackward(
      edge_list&& edges, PyObject* run_, PyObject* rest_, const char* name, bool materializes_, bool runs_once_)
      : Node(std::move(edges)),
        run(Py_NewRef(run_)),
        rest(Py_NewRef(rest_)),
        shown(name),
        materializes(materializes_),
        runs_once(runs_once_) {}

  ~CompiledFunctionBackward() override {
    if (!Py_IsInitialized()) return;
    WithGIL gil;
    Py_DECREF(run);
    Py_DECREF(rest);
  }

  std::string name() const override { return shown; }

  void release_variables() override {
    std::shared_ptr<Saved> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(saved);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(
        false,
        "compiled autograd was turned on for a backward whose forward ran without it: set "
        "torch._dynamo.config.compiled_autograd before the function is compiled");
  }

  variable_list apply(variable_list&& grads) override {
    variable_list out;
    {
      WithGIL gil;
      try {
        out = call(std::move(grads));
      } catch (const PythonErrorSet&) {
        throw python_error();
      }
    }
    add_to_leaves(out);
    return out;
  }

 private:
  // Whether this runs for a backward that adds gradients to the `.grad` of all leaves, and not to those of named inputs
  // alone. User code may call a node by itself, in a backward of something else, too.
  bool adds_to_leaves() const {
    const auto* named = torch::autograd::get_current_graph_task_exec_info();
    return named != nullptr && named->empty() && torch::autograd::get_current_node().get() == this;
  }

  // Has gradients of leaves added without the engine's way to each: it would have a task per leaf. The engine must find no
  // edge to those. It looks for edges as soon as this returns, and then drops what it was returned: with that they are
  // edges again, before anything else runs in this thread. One goes the engine's way, which notes at a leaf on which
  // stream gradients were made. A hook that the engine calls before it calls this may call it, too, and keep all.
  void add_to_leaves(variable_list& gradients) {
    const bool comes_once = num_calls == 1 && !torch::autograd::get_current_graph_task_keep_graph() &&
        (runs_once || (num_saved > 0 && !saved_now()));
    const bool has_hooks = !post_hooks().empty() || !pre_hooks().empty() || !tensor_pre_hooks().empty();
    if (!comes_once || has_hooks || !adds_to_leaves() || at::GradMode::is_enabled() ||
        torch::autograd::AnomalyMode::is_enabled() || c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      return;
    }
    std::vector<std::pair<size_t, AccumulateGrad*>> found;
    found.reserve(gradients.size());
    const at::Device here = device();
    const auto current = stream();
    for (size_t k = 0; k < gradients.size(); ++k) {
      if (!gradients[k].defined()) continue;
      AccumulateGrad* accumulator = accumulator_of_one(next_edges()[k], gradients[k], here, current);
      if (accumulator != nullptr) found.emplace_back(k, accumulator);
    }
    if (found.size() < 2 || have_shared_grads(next_edges())) return;
    found.pop_back();  // the one that is left
    for (const auto& [k, accumulator] : found) {
      variable_list inputs;
      inputs.push_back(std::move(gradients[k]));
      gradients[k] = at::Tensor();
      (*accumulator)(std::move(inputs));
    }
    gradients[found.front().first] = keeping(std::make_unique<TakenEdges>(getptr(), found));
  }

  std::shared_ptr<Saved> saved_now() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return saved;
  }

  // Returns what the edges get.
  variable_list call(variable_list&& grads) {
    ++num_calls;
    std::shared_ptr<Saved> reads = saved_now();
    TORCH_CHECK(reads || num_saved == 0, torch::autograd::ERR_BACKWARD_TWICE);
    variable_list values;
    values.reserve(num_saved);
    const NodePointer self = getptr();
    if (reads) {
      for (const SavedVariable& variable : reads->checked) values.push_back(variable.unpack(self));
      values.insert(values.end(), reads->unchecked.begin(), reads->unchecked.end());
      reads.reset();
    }
    // Else it is done once this has succeeded: what was wrong may be put right, and the backward called again.
    if (materializes && !torch::autograd::get_current_graph_task_keep_graph()) release_variables();
    for (size_t i = 0; materializes && i < grads.size(); ++i) {
      if (!grads[i].defined()) grads[i] = input_metadata(i).zeros_like();
    }
    const bool is_graph_wanted = at::GradMode::is_enabled();  // create_graph=True
    edge_list sources = is_graph_wanted ? sources_with(grads) : edge_list();
    Owned saved_list(list_of(std::move(values)));
    Owned grad_list(list_of(std::move(grads)));
    PyObject* args[] = {rest, saved_list.object, grad_list.object};
    variable_list out;
    {
      const Owned result(PyObject_Vectorcall(run, args, 3, nullptr));  // which empties the lists
      const Items found(result.object);
      out.reserve(wanted.size());
      for (const Py_ssize_t position : wanted) {
        PyObject* item = found.at(position);
        out.push_back(item == Py_None ? at::Tensor() : tensor_of(item));
      }
    }
    if (is_graph_wanted) refuse_more(std::move(sources), out);
    return out;
  }

  // Where all leads that the gradients depend on.
  edge_list sources_with(const variable_list& grads) const {
    edge_list edges = next_edges();
    for (const at::Tensor& grad : grads) {
      if (grad.defined() && grad.requires_grad()) edges.push_back(impl::gradient_edge(grad));
    }
    return edges;
  }

  void refuse_more(edge_list&& sources, variable_list& gradients) const {
    auto& node = *new DoubleBackward(std::move(sources), run, rest);
    const NodePointer pointer = owner_of<NodePointer>(&node);
    for (at::Tensor& gradient : gradients) {
      if (!gradient.defined() || gradient.requires_grad()) continue;
      gradient = gradient.tensor_data();
      const uint32_t number = node.add_input_metadata(gradient);
      impl::set_gradient_edge(gradient, Edge(pointer, number));
    }
  }

 public:
  size_t num_saved = 0;
};

// attach(run, rest, inputs, wanted, outputs, differentiable, checked, unchecked, name, materialize,
// once) puts a node between tensors.
// run: run(rest, saved, grads) returns a list with a gradient, or None, for each of inputs; it gets two lists
//     that it may empty: what was saved, and a gradient for each differentiable output. With None for both it
//     raises: that is called where gradients that were taken under create_graph=True are differentiated.
// rest: What else the backward reads, for run.
// inputs: A list or tuple.
// wanted: Positions of the inputs that get gradients.
// outputs: A list. An output that is a view or requires grad already is replaced in it.
// differentiable: Positions of the outputs that get the node.
// checked: Tensors to be saved; that they were written in the meantime is an error, as for torch's own
//     operators.
// unchecked: Tensors to be saved without that.
// name: What the node is called.
// materialize: Whether a gradient that nothing gave is zeros for run; else None.
// once: Whether run raises when it is called again. The node itself does so once saved tensors were dropped.
PyObject* attach(PyObject* const* args) {
  const Items inputs(args[2]), wanted(args[3]), differentiable(args[5]), checked(args[6]), unchecked(args[7]);
  if (!PyList_Check(args[4])) fail(PyExc_TypeError, "outputs: expected a list");
  const char* name = PyUnicode_AsUTF8(args[8]);
  if (name == nullptr) throw PythonErrorSet();
  const Items outputs(args[4]);
  edge_list edges;
  std::vector<Py_ssize_t> positions;
  edges.reserve(wanted.size);
  for (Py_ssize_t k = 0; k < wanted.size; ++k) {
    positions.push_back(wanted.number(k));
    edges.push_back(impl::gradient_edge(tensor_of(inputs.at(positions.back()))));
  }
  auto& node = *new CompiledFunctionBackward(
      std::move(edges), args[0], args[1], name, args[9] == Py_True, args[10] == Py_True);
  const NodePointer pointer = owner_of<NodePointer>(&node);
  node.wanted = std::move(positions);
  node.num_saved = checked.size + unchecked.size;

  std::vector<at::Tensor> results;
  results.reserve(differentiable.size);
  for (Py_ssize_t k = 0; k < differentiable.size; ++k) {
    const Py_ssize_t position = differentiable.number(k);
    at::Tensor result = tensor_of(outputs.at(position));
    if (result.is_view() || result.requires_grad()) {  // as made by operators that ran plainly
      result = result.tensor_data();
      PyObject* made = THPVariable_Wrap(at::Tensor(result));
      if (made == nullptr) throw PythonErrorSet();
      if (PyList_SetItem(args[4], position, made) < 0) throw PythonErrorSet();
    }
    results.push_back(std::move(result));
  }
  // A saved tensor that is an output, too, would keep its own node alive.
  const auto to_save = [&](PyObject* item) -> at::Tensor {
    const at::Tensor& tensor = tensor_of(item);
    const bool is_result = std::any_of(results.begin(), results.end(), [&](const at::Tensor& r) {
      return r.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl();
    });
    return is_result ? tensor.tensor_data() : tensor;
  };
  {
    const at::AutoGradMode no_grad(false);
    const auto saved = std::make_shared<CompiledFunctionBackward::Saved>();
    saved->checked.reserve(checked.size);
    for (Py_ssize_t k = 0; k < checked.size; ++k) {
      saved->checked.emplace_back(to_save(checked.at(k)), /*is_output=*/false);
    }
    saved->unchecked.reserve(unchecked.size);
    for (Py_ssize_t k = 0; k < unchecked.size; ++k) {
      saved->unchecked.push_back(to_save(unchecked.at(k)));
    }
    node.saved = saved;
  }
  for (const at::Tensor& result : results) {
    const uint32_t number = node.add_input_metadata(result);
    impl::set_gradient_edge(result, Edge(pointer, number));
  }
#ifdef HAS_CREATION_HOOKS
  torch::autograd::fire_node_creation_hooks(pointer);
#endif
  Py_RETURN_NONE;
}

template <PyObject* (*function)(PyObject* const*), Py_ssize_t num_args>
PyObject* guarded(PyObject*, PyObject* const* args, Py_ssize_t n) {
  try {
    if (n != num_args) fail(PyExc_TypeError, "wrong number of arguments");
    return function(args);
  } catch (const PythonErrorSet&) {
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

#define METHOD(name, n) {#name, (PyCFunction)(void*)guarded<name, n>, METH_FASTCALL, nullptr}
PyMethodDef methods[] = {
    METHOD(static_key, 2),
    METHOD(storage_key, 2),
    METHOD(watched, 1),
    METHOD(layouts, 1),
    METHOD(requiring_grad, 1),
    METHOD(unchanged, 5),
    METHOD(members, 2),
    METHOD(geometry, 2),
    METHOD(note_written, 1),
    METHOD(in_transform, 0),
    METHOD(any_held, 2),
    METHOD(any_held_among, 2),
    METHOD(held, 2),
    METHOD(stand_in, 3),
    METHOD(aliases, 1),
    METHOD(views, 2),
    METHOD(copies, 1),
    METHOD(put, 3),
    METHOD(fits, 3),
    METHOD(exclusive, 3),
    METHOD(swap_storages, 2),
    METHOD(are, 3),
    METHOD(contents, 2),
    METHOD(first_watched, 1),
    METHOD(attach, 11),
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods};
}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }
