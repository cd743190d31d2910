// What a call does once per tensor, without Python per tensor. The same functions in Python: fast_python.py.
//
// torch/csrc/autograd/python_variable.h takes 15 s to compile, ATen/core/Tensor.h 2 s. The three things that are needed
// of the former are therefore declared here; native.py checks that tensors are laid out so before it loads this.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/ops/view_ops.h>
#include <Python.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

// Source: torch/csrc/autograd/python_variable.h and torch/csrc/Exceptions.h, 2.11 to 2.15.
struct PyTensor {
  PyObject_HEAD
  at::Tensor cdata;
};
extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(at::TensorBase&& var);
namespace torch {
void translate_exception_to_python(const std::exception_ptr&);
}
// Source: torch/csrc/Dtype.h and torch/csrc/DynamicTypes.h.
struct THPDtype;
namespace torch {
THPDtype* getTHPDtype(at::ScalarType);
}

// Source: torch/csrc/autograd/variable.h. torch 2.11 holds a node by shared_ptr, 2.13 by intrusive_ptr: which setter
// there is tells, and the getter's name is the same for both. Nothing here looks into a node.
namespace torch::autograd {
struct Node : c10::intrusive_ptr_target {};
namespace impl {
__attribute__((weak)) void set_grad_accumulator(const at::Tensor&, std::weak_ptr<Node>);
__attribute__((weak)) void set_grad_accumulator(const at::Tensor&, c10::weak_intrusive_ptr<Node>);
#define GETTER __asm__("_ZN5torch8autograd4impl24try_get_grad_accumulatorERKN2at6TensorE")
std::shared_ptr<Node> shared_accumulator(const at::Tensor&) GETTER;
c10::intrusive_ptr<Node> intrusive_accumulator(const at::Tensor&) GETTER;
#undef GETTER
}  // namespace impl
}  // namespace torch::autograd

namespace {

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

int64_t version_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) return 0;
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

constexpr auto static_key = numbers<address_of>;
constexpr auto versions = numbers<version_of>;

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
  const auto* bytes = reinterpret_cast<const char*>(out.data());
  return PyBytes_FromStringAndSize(bytes, static_cast<Py_ssize_t>(out.size() * sizeof(int64_t)));
}

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
  const auto* bytes = reinterpret_cast<const char*>(out.data());
  return PyBytes_FromStringAndSize(bytes, static_cast<Py_ssize_t>(out.size() * sizeof(int64_t)));
}

PyObject* requiring_grad(PyObject* const* args) {
  const Items values(args[0]);
  Owned out(PyBytes_FromStringAndSize(nullptr, values.size));
  char* flags = PyBytes_AS_STRING(out.object);
  for (Py_ssize_t k = 0; k < values.size; ++k) {
    flags[k] = static_cast<char>(tensor_of(values.items[k]).requires_grad());
  }
  return out.release();
}

PyObject* unchanged(PyObject* const* args) {
  const Items mappings(args[0]), keys(args[1]), values(args[2]), holders(args[3]);
  if (!PyBytes_Check(args[4])) fail(PyExc_TypeError, "expected bytes");
  const auto num_sizes = PyBytes_GET_SIZE(args[4]) / static_cast<Py_ssize_t>(sizeof(int64_t));
  if (mappings.size != keys.size || keys.size != values.size || holders.size != num_sizes) {
    fail(PyExc_ValueError, "as many values as keys expected");
  }
  const auto* sizes = reinterpret_cast<const int64_t*>(PyBytes_AS_STRING(args[4]));
  for (Py_ssize_t k = 0; k < holders.size; ++k) {
    PyObject* holder = holders.items[k];
    const Py_ssize_t size = PyDict_Check(holder) ? PyDict_GET_SIZE(holder) : PyObject_Size(holder);
    if (size < 0) throw PythonErrorSet();
    if (size != sizes[k]) Py_RETURN_FALSE;
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

PyObject* members(PyObject* const* args) {
  const Items mappings(args[0]), keys(args[1]);
  if (mappings.size != keys.size) fail(PyExc_ValueError, "as many mappings as keys expected");
  Owned out(PyList_New(keys.size));
  for (Py_ssize_t k = 0; k < keys.size; ++k) {
    PyObject* found = nullptr;
    if (PyDict_CheckExact(mappings.items[k])) {
      found = Py_XNewRef(PyDict_GetItemWithError(mappings.items[k], keys.items[k]));
      if (found == nullptr && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, keys.items[k]);
    } else {
      found = PyObject_GetItem(mappings.items[k], keys.items[k]);
    }
    if (found == nullptr) throw PythonErrorSet();
    PyList_SET_ITEM(out.object, k, found);
  }
  return out.release();
}

// References to a storage in C++ and, since its Python object is one of these whoever holds that, to the latter.
size_t users_of(c10::StorageImpl* storage) {
  PyObject* object = storage->pyobj_slot()->load_pyobj();
  return c10::raw::intrusive_ptr::use_count(storage) + (object ? Py_REFCNT(object) : 0);
}

PyObject* in_transform(PyObject* const*) {
  const c10::DispatchKeySet transforms(
      {c10::DispatchKey::VmapMode, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms)) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

struct Watched {  // storages, where they lay and how many users they had
  struct Entry {
    int64_t storage, address, users;
    c10::StorageImpl* impl() const { return reinterpret_cast<c10::StorageImpl*>(storage); }
  };
  const Entry* entries;
  Py_ssize_t size;
  explicit Watched(PyObject* const* args) {
    const Items storages(args[0]);
    if (!PyBytes_Check(args[1])) fail(PyExc_TypeError, "expected bytes");
    entries = reinterpret_cast<const Entry*>(PyBytes_AS_STRING(args[1]));
    size = PyBytes_GET_SIZE(args[1]) / sizeof(Entry);
    if (size != storages.size || PyBytes_GET_SIZE(args[1]) % sizeof(Entry) != 0) {
      fail(PyExc_ValueError, "as many counts as storages expected");
    }
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

PyObject* any_held(PyObject* const* args) {
  const Watched watched(args);
  for (Py_ssize_t k = 0; k < watched.size; ++k) {
    if (watched.is_held(k)) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

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

PyObject* aliases(PyObject* const* args) {
  const Items tensors(args[0]);
  Owned out(PyList_New(tensors.size));
  for (Py_ssize_t k = 0; k < tensors.size; ++k) {
    Owned alias(THPVariable_Wrap(at::Tensor(renewed(tensor_of(tensors.items[k])))));
    PyList_SET_ITEM(out.object, k, alias.release());
  }
  return out.release();
}

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

using torch::autograd::Node;
namespace impl = torch::autograd::impl;
using SetShared = void (*)(const at::Tensor&, std::weak_ptr<Node>);
using SetIntrusive = void (*)(const at::Tensor&, c10::weak_intrusive_ptr<Node>);

struct Accumulator {  // of one tensor, or none
  std::shared_ptr<Node> shared;
  c10::intrusive_ptr<Node> intrusive;
};
constexpr const char* accumulator_name = "cgpass.accumulator";

void set_accumulator(const at::Tensor& tensor, const Accumulator& held) {
  if (const SetShared set = &impl::set_grad_accumulator) return set(tensor, held.shared);
  const SetIntrusive set = &impl::set_grad_accumulator;
  set(tensor, c10::weak_intrusive_ptr<Node>(held.intrusive));
}

Accumulator accumulator_of(const at::Tensor& tensor) {
  if (const SetShared set = &impl::set_grad_accumulator) {
    return {impl::shared_accumulator(tensor), {}};
  }
  return {{}, impl::intrusive_accumulator(tensor)};
}

PyObject* take_accumulators(PyObject* const* args) {
  const Items tensors(args[0]);
  Owned out(PyList_New(tensors.size));
  for (Py_ssize_t k = 0; k < tensors.size; ++k) {
    const at::Tensor& tensor = tensor_of(tensors.items[k]);
    TORCH_CHECK(tensor.is_leaf(), "only leaves have gradients accumulated");
    auto held = std::make_unique<Accumulator>(
        tensor.requires_grad() ? accumulator_of(tensor) : Accumulator());
    Owned capsule(PyCapsule_New(held.get(), accumulator_name, [](PyObject* self) {
      delete static_cast<Accumulator*>(PyCapsule_GetPointer(self, accumulator_name));
    }));
    held.release();
    if (tensor.requires_grad()) set_accumulator(tensor, {});
    PyList_SET_ITEM(out.object, k, capsule.release());
  }
  return out.release();
}

PyObject* put_accumulators(PyObject* const* args) {
  const Items tensors(args[0]);
  const Items taken(args[1]);
  if (tensors.size != taken.size) fail(PyExc_ValueError, "as many accumulators as tensors expected");
  for (Py_ssize_t k = 0; k < tensors.size; ++k) {
    const at::Tensor& tensor = tensor_of(tensors.items[k]);
    auto* held = static_cast<Accumulator*>(PyCapsule_GetPointer(taken.items[k], accumulator_name));
    if (held == nullptr) throw PythonErrorSet();
    const bool is_known = held->shared || held->intrusive;
    if (is_known && tensor.is_leaf()) set_accumulator(tensor, *held);
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

PyObject* views(PyObject* const* args) {
  const Items values(args[0]);
  const Items specs(args[1]);
  Owned out(PyList_New(specs.size));
  for (Py_ssize_t k = 0; k < specs.size; ++k) {
    PyObject* spec = specs.items[k];
    if (!PyTuple_Check(spec) || PyTuple_GET_SIZE(spec) != 4) {
      fail(PyExc_TypeError, "expected (index, size, stride, offset)");
    }
    const at::Tensor& base = tensor_of(values.at(PyTuple_GET_ITEM(spec, 0)));
    Owned view(THPVariable_Wrap(view_of(base, spec)));
    PyList_SET_ITEM(out.object, k, view.release());
  }
  return out.release();
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

// As bits.py.
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

PyObject* copies(PyObject* const* args) {
  const Items tensors(args[0]);
  if (tensors.size == 0) return PyList_New(0);
  std::vector<at::Tensor> sources;
  sources.reserve(tensors.size);
  for (Py_ssize_t k = 0; k < tensors.size; ++k) sources.push_back(tensor_of(tensors.items[k]));
  std::vector<at::Tensor> results = copied(sources);
  Owned out(PyList_New(tensors.size));
  for (Py_ssize_t k = 0; k < tensors.size; ++k) {
    Owned copy(THPVariable_Wrap(std::move(results[k])));
    PyList_SET_ITEM(out.object, k, copy.release());
  }
  return out.release();
}

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

bool lies_as(const at::Tensor& tensor, const at::Tensor& target) {
  return tensor.const_data_ptr() == target.const_data_ptr() && tensor.strides() == target.strides() &&
         tensor.is_conj() == target.is_conj() && tensor.is_neg() == target.is_neg();
}

PyObject* fill(PyObject* const* args) {
  const Items targets(args[0]), values(args[1]);
  if (targets.size != values.size) fail(PyExc_ValueError, "as many values as targets expected");
  if (!PyBytes_Check(args[2])) fail(PyExc_TypeError, "expected bytes");
  const auto* shared = reinterpret_cast<const int64_t*>(PyBytes_AS_STRING(args[2]));
  const auto* end = shared + PyBytes_GET_SIZE(args[2]) / sizeof(int64_t);
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (Py_ssize_t k = 0; k < targets.size; ++k) {
    const at::Tensor &target = tensor_of(targets.items[k]), &value = tensor_of(values.items[k]);
    if (lies_as(value, target)) continue;
    if (shared != end) {
      const auto address = reinterpret_cast<int64_t>(value.storage().data());
      if (std::find(shared, end, address) != end) return PyLong_FromLong(-1);
    }
    pairs.emplace_back(target, value);
  }
  int64_t bytes = 0;
  const at::AutoGradMode no_grad(false);
  for (auto& [target, value] : pairs) {
    at::_ops::copy_::call(target, value, false);
    bytes += static_cast<int64_t>(target.nbytes());
  }
  return PyLong_FromLongLong(bytes);
}

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

template <PyObject* (*function)(PyObject* const*), Py_ssize_t num_args>
PyObject* guarded(PyObject*, PyObject* const* args, Py_ssize_t n) {
  try {
    if (n != num_args) fail(PyExc_TypeError, "wrong number of arguments");
    return function(args);
  } catch (const PythonErrorSet&) {
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

#define METHOD(name, n) {#name, (PyCFunction)(void*)guarded<name, n>, METH_FASTCALL, nullptr}
PyMethodDef methods[] = {
    METHOD(static_key, 2),
    METHOD(layouts, 1),
    METHOD(requiring_grad, 1),
    METHOD(unchanged, 5),
    METHOD(members, 2),
    METHOD(geometry, 2),
    METHOD(versions, 2),
    METHOD(in_transform, 0),
    METHOD(any_held, 2),
    METHOD(any_held_among, 2),
    METHOD(held, 2),
    METHOD(stand_in, 3),
    METHOD(aliases, 1),
    METHOD(views, 2),
    METHOD(copies, 2),
    METHOD(put, 3),
    METHOD(fits, 3),
    METHOD(fill, 3),
    METHOD(exclusive, 3),
    METHOD(swap_storages, 2),
    METHOD(take_accumulators, 1),
    METHOD(put_accumulators, 2),
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", nullptr, -1, methods};
}  // namespace

PyMODINIT_FUNC PyInit__fast() { return PyModule_Create(&module); }
