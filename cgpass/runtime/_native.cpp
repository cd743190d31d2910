// What runs without Python per tensor: what a call does once per tensor, and the node of autograd's graph that stands for a
// compiled or graphed function. native.py compiles this, fast.py hands it out.

#define AT_PER_OPERATOR_HEADERS  // half the time to compile
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_foreach_copy_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#define HAS_CREATION_HOOKS
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <utility>
#include <vector>

namespace {

namespace impl = torch::autograd::impl;
using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(Edge::function);  // shared_ptr in torch 2.11, intrusive_ptr in 2.13
using Owned = THPObjectPtr;

[[noreturn]] void fail(PyObject* type, const char* message) {
  PyErr_SetString(type, message);
  throw python_error();
}

PyObject* made(PyObject* object) {  // a new reference
  if (object == nullptr) throw python_error();
  return object;
}

const at::Tensor& tensor_of(PyObject* object) {
  if (!THPVariable_Check(object)) fail(PyExc_TypeError, "expected a tensor");
  return THPVariable_Unpack(object);
}

Py_ssize_t number_of(PyObject* object) {
  const Py_ssize_t number = PyLong_AsSsize_t(object);
  if (number == -1 && PyErr_Occurred()) throw python_error();
  return number;
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
  PyObject* operator[](Py_ssize_t i) const {
    if (i < 0 || i >= size) fail(PyExc_IndexError, "position out of range");
    return items[i];
  }
  const at::Tensor& tensor(Py_ssize_t i) const { return tensor_of((*this)[i]); }
  Py_ssize_t number(Py_ssize_t i) const { return number_of((*this)[i]); }
};

template <class Make>
PyObject* list_of(Py_ssize_t size, Make make) {  // of what `make` returns for each position: new references
  Owned list(made(PyList_New(size)));
  for (Py_ssize_t k = 0; k < size; ++k) PyList_SET_ITEM(list.get(), k, made(make(k)));
  return list.release();
}

PyObject* bytes_of(const std::vector<int64_t>& numbers) {
  const auto* bytes = reinterpret_cast<const char*>(numbers.data());
  return PyBytes_FromStringAndSize(bytes, static_cast<Py_ssize_t>(numbers.size() * sizeof(int64_t)));
}

template <class Entry>
struct Entries {  // that bytes stand for
  const Entry* entries;
  Entries(PyObject* bytes, Py_ssize_t size) {
    if (!PyBytes_Check(bytes)) fail(PyExc_TypeError, "expected bytes");
    if (PyBytes_GET_SIZE(bytes) != size * static_cast<Py_ssize_t>(sizeof(Entry))) {
      fail(PyExc_ValueError, "as many numbers as objects expected");
    }
    entries = reinterpret_cast<const Entry*>(PyBytes_AS_STRING(bytes));
  }
};

int64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.const_data_ptr());
}

int64_t storage_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.storage().unsafeGetStorageImpl());
}

// Where a tensor lies, and how: of parameters that Python code gives other data, no guard knows it (torch 2.11). Zero if it
// has no memory.
int64_t place_at(const c10::TensorImpl& tensor) {
  const c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || storage->data() == nullptr || tensor.numel() == 0) return 0;
  auto mixed = reinterpret_cast<uint64_t>(storage->data()) + tensor.storage_offset() * tensor.itemsize();
  const auto mix = [&](int64_t number) { mixed = (mixed ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15; };
  mix(static_cast<int64_t>(tensor.dtype().toScalarType()));
  std::for_each(tensor.sizes().begin(), tensor.sizes().end(), mix);
  if (!tensor.is_contiguous()) std::for_each(tensor.strides().begin(), tensor.strides().end(), mix);
  return static_cast<int64_t>(mixed);
}

int64_t place_of(const at::Tensor& tensor) { return place_at(*tensor.unsafeGetTensorImpl()); }

// static_key(args, positions): addresses and layouts of tensors, each as one 64-bit integer (`place_at`).
// storage_key(args, positions): identities of their storages (UntypedStorage._cdata), likewise.
template <int64_t (*of)(const at::Tensor&)>
PyObject* numbers(PyObject* const* args) {
  const Items values(args[0]), positions(args[1]);
  std::vector<int64_t> out(positions.size);
  for (Py_ssize_t k = 0; k < positions.size; ++k) out[k] = of(values.tensor(positions.number(k)));
  return bytes_of(out);
}
constexpr auto static_key = numbers<place_of>;
constexpr auto storage_key = numbers<storage_of>;

// layouts(tensors): what a graph that reads tensors where they lie has in it, as 64-bit integers. For each tensor: number
// of dimensions, address, position of the first that is the same object, id of its dtype, whether it is conjugated or
// negated, sizes, strides.
PyObject* layouts(PyObject* const* args) {
  const Items values(args[0]);
  ska::flat_hash_map<PyObject*, int64_t> firsts;
  std::vector<int64_t> out;
  out.reserve(9 * values.size);
  for (Py_ssize_t k = 0; k < values.size; ++k) {
    const at::Tensor& tensor = values.tensor(k);
    out.push_back(tensor.dim());
    out.push_back(address_of(tensor));
    out.push_back(firsts.emplace(values[k], k).first->second);
    out.push_back(reinterpret_cast<int64_t>(torch::getTHPDtype(tensor.scalar_type())));
    out.push_back(tensor.is_conj() + 2 * tensor.is_neg());
    out.insert(out.end(), tensor.sizes().begin(), tensor.sizes().end());
    out.insert(out.end(), tensor.strides().begin(), tensor.strides().end());
  }
  return bytes_of(out);
}

// requiring_grad(tensors): which tensors require grad, a byte each.
PyObject* requiring_grad(PyObject* const* args) {
  const Items values(args[0]);
  std::string flags(values.size, 0);
  for (Py_ssize_t k = 0; k < values.size; ++k) flags[k] = values.tensor(k).requires_grad();
  return PyBytes_FromStringAndSize(flags.data(), values.size);
}

// unchanged(dicts, keys, values, holders, sizes): whether each dict has the same object for its key as before, where
// ... stands for nothing, and each holder, another container, has its size: 64-bit integers.
PyObject* unchanged(PyObject* const* args) {
  const Items dicts(args[0]), keys(args[1]), values(args[2]), holders(args[3]);
  const Entries<int64_t> sizes(args[4], holders.size);
  for (Py_ssize_t k = 0; k < holders.size; ++k) {
    const Py_ssize_t size = PyObject_Size(holders[k]);
    if (size < 0) throw python_error();
    if (size != sizes.entries[k]) Py_RETURN_FALSE;
  }
  for (Py_ssize_t k = 0; k < keys.size; ++k) {
    PyObject* found = PyDict_GetItemWithError(dicts[k], keys[k]);
    if (found == nullptr && PyErr_Occurred()) throw python_error();
    if ((found != nullptr ? found : Py_Ellipsis) != values[k]) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// in_transform(): whether tensors may come without memory of their own: inside vmap, torch.func.grad and their like. Batched
// gradients (is_grads_batched=True, jacobian(vectorize=True)) come from a vmap that is no functorch level.
PyObject* in_transform(PyObject* const*) {
  const c10::DispatchKeySet transforms(
      {c10::DispatchKey::VmapMode, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  return PyBool_FromLong(c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms));
}

// ---- who holds a storage

// References to a storage in C++ and, since its Python object is one of these, to that.
size_t users_of(c10::StorageImpl* storage) {
  PyObject* object = storage->pyobj_slot()->load_pyobj();
  return c10::raw::intrusive_ptr::use_count(storage) + (object ? Py_REFCNT(object) : 0);
}

// watched(storages): what any_held compares storages with; to be asked for while nobody else holds them. Three 64-bit
// integers for each: StorageImpl, address, number of users.
PyObject* watched(PyObject* const* args) {
  const Items storages(args[0]);
  std::vector<int64_t> out;
  out.reserve(3 * storages.size);
  for (Py_ssize_t k = 0; k < storages.size; ++k) {
    Owned identity(made(PyObject_GetAttrString(storages[k], "_cdata")));
    auto* storage = reinterpret_cast<c10::StorageImpl*>(number_of(identity.get()));
    out.push_back(reinterpret_cast<int64_t>(storage));
    out.push_back(reinterpret_cast<int64_t>(storage->data()));
    out.push_back(static_cast<int64_t>(users_of(storage)));
  }
  return bytes_of(out);
}

struct Watch {  // one of them
  int64_t storage, address, users;
  c10::StorageImpl* impl() const { return reinterpret_cast<c10::StorageImpl*>(storage); }
};

struct Watched : Entries<Watch> {
  Py_ssize_t size;
  Watched(PyObject* storages, PyObject* bytes) : Entries(bytes, Items(storages).size), size(Items(storages).size) {}
  // Since the last call others have used the cache: what is read next is on its way while this is compared.
  bool is_held(Py_ssize_t k) const {
    if (k + 16 < size) __builtin_prefetch(entries[k + 16].impl());
    if (k + 8 < size) __builtin_prefetch(entries[k + 8].impl()->pyobj_slot()->load_pyobj());
    auto* storage = entries[k].impl();
    return users_of(storage) != static_cast<size_t>(entries[k].users) ||
        reinterpret_cast<int64_t>(storage->data()) != entries[k].address;
  }
};

// any_held(*watch): whether some storage has another number of users than it should, or lies elsewhere.
PyObject* any_held(PyObject* const* args) {
  const Watched watched(args[0], args[1]);
  for (Py_ssize_t k = 0; k < watched.size; ++k) {
    if (watched.is_held(k)) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

// any_held_among(entries, among): whether some storage of certain ones is held. An entry is a number, and something with a
// watch; among has positions of storages by that number. Entries of other numbers are left out.
PyObject* any_held_among(PyObject* const* args) {
  static PyObject* const name = PyUnicode_InternFromString("watch");
  const Items entries(args[0]);
  for (Py_ssize_t k = 0; k < entries.size; ++k) {
    const Items entry(entries[k]);
    PyObject* positions = PyDict_GetItemWithError(args[1], entry[0]);
    if (positions == nullptr && PyErr_Occurred()) throw python_error();
    if (positions == nullptr) continue;
    const Items among(positions);
    Owned watch(made(PyObject_GetAttr(entry[1], name)));
    const Items parts(watch.get());
    const Watched watched(parts[0], parts[1]);
    for (Py_ssize_t n = 0; n < among.size; ++n) {
      const Py_ssize_t i = among.number(n);
      if (i < 0 || i >= watched.size) fail(PyExc_IndexError, "position out of range");
      if (watched.is_held(i)) Py_RETURN_TRUE;
    }
  }
  Py_RETURN_FALSE;
}

// exclusive(args, positions, counts): whether nobody but the list args holds the tensors at positions, and their storages
// have as many users as given.
PyObject* exclusive(PyObject* const* args) {
  const Items values(args[0]), positions(args[1]), counts(args[2]);
  for (Py_ssize_t k = 0; k < positions.size; ++k) {
    PyObject* object = values[positions.number(k)];
    const at::Tensor& tensor = tensor_of(object);
    const auto users = users_of(tensor.storage().unsafeGetStorageImpl());
    if (Py_REFCNT(object) != 1 || tensor.use_count() != 1 ||
        users != static_cast<size_t>(counts.number(k))) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

// ---- tensors on memory that is there

// That may be resized. Lifetime: owns nothing; the caller keeps the memory alive.
c10::Storage memory_at(void* address, size_t bytes, at::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(address, device), c10::GetAllocator(device.type()), true);
}

at::Tensor bytes_on(const c10::Storage& storage) {
  const c10::DispatchKeySet keys(c10::computeDispatchKey(at::kByte, at::kStrided, storage.device()));
  at::Tensor out = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(storage), keys, caffe2::TypeMeta::Make<uint8_t>());
  out.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return out;
}

// stand_in(address, num_bytes, like): memory at an address on the device of like, as bytes that may be resized.
// Lifetime: owns nothing; the caller keeps the memory alive.
PyObject* stand_in(PyObject* const* args) {
  void* address = PyLong_AsVoidPtr(args[0]);
  const Py_ssize_t bytes = number_of(args[1]);
  return THPVariable_Wrap(bytes_on(memory_at(address, bytes, tensor_of(args[2]).device())));
}

// aliases(tensors, leaders): data of the first, as many as there are leaders; a leader is the position of the first on the
// same storage. Lifetime: they hold the same storages. What shares one shares a version counter, made here: what callers
// write to one call's output concerns no other's. What has no memory gets a storage of its own: its holder may enlarge it.
PyObject* aliases(PyObject* const* args) {
  const Items tensors(args[0]), leaders(args[1]);
  std::vector<c10::VariableVersion> versions;
  versions.reserve(leaders.size);
  return list_of(leaders.size, [&](Py_ssize_t k) {
    const at::Tensor& original = tensors.tensor(k);
    const Py_ssize_t leader = leaders.number(k);
    versions.push_back(leader < k ? versions.at(leader) : c10::VariableVersion(0));
    auto alias = original.unsafeGetTensorImpl()->shallow_copy_and_detach(versions.back(), true);
    if (original.storage().nbytes() == 0) alias->set_storage_keep_dtype(memory_at(nullptr, 0, original.device()));
    return THPVariable_Wrap(at::Tensor(std::move(alias)));
  });
}

// copy_out(results, positions): put copies of strided tensors in their place in a list, on the current stream; returns the
// bytes copied. Lifetime: the copies are the caller's; what was one tensor, or shared memory, does so again. Of a storage
// that is what its tensors span, and of one with gaps its elements alone. Strides stay, and addresses modulo 64: the bits of
// what operators compute of them may depend on both.
PyObject* copy_out(PyObject* const* args) {
  const Items results(args[0]), positions(args[1]);
  struct Copy {
    const at::Tensor* of = nullptr;
    bool is_of_one = true;
    int64_t begin = INT64_MAX, end = 0;
    at::Tensor bytes;
    c10::VariableVersion version = c10::VariableVersion(0);
  };
  ska::flat_hash_map<const void*, Copy> copies;
  for (Py_ssize_t k = 0; k < positions.size; ++k) {
    const at::Tensor& tensor = results.tensor(positions.number(k));
    Copy& copy = copies[tensor.storage().unsafeGetStorageImpl()];
    copy.is_of_one = copy.of == nullptr || (copy.is_of_one && copy.of->is_same(tensor));
    copy.of = &tensor;
    if (tensor.numel() == 0) continue;
    const int64_t offset = tensor.storage_offset(), size = static_cast<int64_t>(tensor.itemsize());
    const size_t end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), size, offset);
    copy.begin = std::min(copy.begin, offset * size);
    copy.end = std::max(copy.end, static_cast<int64_t>(end));
  }
  const auto laid_on = [](const at::Tensor& tensor, const Copy& copy) {
    auto alias = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(copy.version, true);
    alias->set_storage_keep_dtype(copy.bytes.storage());
    const int64_t begin = copy.begin / static_cast<int64_t>(tensor.itemsize());
    alias->set_storage_offset(tensor.numel() == 0 ? 0 : tensor.storage_offset() - begin);
    return at::Tensor(std::move(alias));
  };
  std::vector<at::Tensor> sources, targets;
  int64_t num_bytes = 0;
  {
    const py::gil_scoped_release no_gil;
    for (auto& [_, copy] : copies) {
      const at::Tensor& tensor = *copy.of;
      const int64_t size = static_cast<int64_t>(tensor.nbytes()), span = copy.end - copy.begin;
      const bool has_gaps = copy.is_of_one && size < span && !tensor.is_conj() && !tensor.is_neg() &&
          !tensor.is_quantized() && at::has_internal_overlap(tensor) != at::MemOverlap::Yes;
      copy.begin = std::min(copy.begin, copy.end) / 64 * 64;
      at::Tensor source = bytes_on(tensor.storage());
      source.unsafeGetTensorImpl()->set_sizes_contiguous({copy.end - copy.begin});
      source.unsafeGetTensorImpl()->set_storage_offset(copy.begin);
      copy.bytes = at::empty_like(source);
      num_bytes += has_gaps ? size : source.numel();
      if (has_gaps) {
        laid_on(tensor, copy).copy_(tensor.detach());
        copy.version = c10::VariableVersion(0);  // it counted this
      } else {
        sources.push_back(std::move(source));
        targets.push_back(copy.bytes);
      }
    }
    if (!sources.empty()) at::_ops::_foreach_copy_::call(targets, sources, false);
  }
  ska::flat_hash_map<PyObject*, PyObject*> twins;
  Owned made_of(list_of(positions.size, [&](Py_ssize_t k) {
    PyObject* original = results[positions.number(k)];
    PyObject*& twin = twins[original];
    if (twin != nullptr) return Py_NewRef(twin);
    const at::Tensor& tensor = tensor_of(original);
    return twin = THPVariable_Wrap(laid_on(tensor, copies[tensor.storage().unsafeGetStorageImpl()]));
  }));
  for (Py_ssize_t k = 0; k < positions.size; ++k) {
    PyObject* copy = Py_NewRef(PyList_GET_ITEM(made_of.get(), k));
    if (PyList_SetItem(args[0], positions.number(k), copy) < 0) throw python_error();
  }
  return PyLong_FromSsize_t(num_bytes);
}

// views(args, specs): parts of inputs' storages, aliases as detach() makes them. See fast.ViewSpec.
PyObject* views(PyObject* const* args) {
  const Items values(args[0]), specs(args[1]);
  return list_of(specs.size, [&](Py_ssize_t k) {
    const Items spec(specs[k]);
    const at::Tensor &base = values.tensor(spec.number(0)), &like = spec.tensor(1);
    const int64_t first = base.storage_offset() * static_cast<int64_t>(base.itemsize()) + spec.number(2);
    const int64_t item = static_cast<int64_t>(like.itemsize()), offset = first / item;
    TORCH_CHECK(
        first % item == 0, "an input is returned as torch.", torch::getTHPDtype(like.scalar_type())->name,
        ": the byte of its storage that it begins at must be divisible by ", item, ", but is ", first);
    const size_t bytes = at::detail::computeStorageNbytes(like.sizes(), like.strides(), item, offset);
    TORCH_CHECK(first >= 0 && bytes <= base.storage().nbytes(), "view out of the bounds of its storage");
    auto* original = base.unsafeGetTensorImpl();
    auto view = original->shallow_copy_and_detach(original->version_counter(), true);
    view->set_storage_and_dtype(base.storage(), like.dtype());
    view->_set_conj(like.is_conj());
    view->_set_neg(like.is_neg());
    view->set_sizes_and_strides(like.sizes(), like.strides(), offset);
    return THPVariable_Wrap(at::Tensor(std::move(view)));
  });
}

// swap_storages(first, second): exchange the memory under each pair, for everybody who holds their storages.
PyObject* swap_storages(PyObject* const* args) {
  const Items first(args[0]), second(args[1]);
  for (Py_ssize_t k = 0; k < first.size; ++k) {
    auto* a = first.tensor(k).storage().unsafeGetStorageImpl();
    auto* b = second.tensor(k).storage().unsafeGetStorageImpl();
    TORCH_CHECK(
        a->nbytes() == b->nbytes() && a->device() == b->device(),
        "storages of one size on one device expected");
    auto from_a = a->set_data_ptr(at::DataPtr(nullptr, a->device()));
    auto from_b = b->set_data_ptr(std::move(from_a));
    a->set_data_ptr(std::move(from_b));
  }
  Py_RETURN_NONE;
}

// fits(values, likes, may_require_grad): whether values are dense tensors of the sizes, dtypes and devices of others. A byte
// for each says whether it may require grad where gradients are recorded.
PyObject* fits(PyObject* const* args) {
  const Items values(args[0]), likes(args[1]);
  const Entries<char> may_require_grad(args[2], likes.size);
  if (values.size != likes.size) Py_RETURN_FALSE;
  for (Py_ssize_t k = 0; k < values.size; ++k) {
    if (!THPVariable_Check(values[k])) Py_RETURN_FALSE;
    const at::Tensor &tensor = values.tensor(k), &like = likes.tensor(k);
    if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor.sizes() != like.sizes() ||
        tensor.scalar_type() != like.scalar_type() || tensor.device() != like.device() ||
        (c10::GradMode::is_enabled() && !may_require_grad.entries[k] && tensor.requires_grad())) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

// ---- leaves

// Whether Python hooks were all removed: their dictionary stays, empty. The classes' type information is not exported, so
// they are told by name.
template <typename Hooks, typename Hook>
bool were_removed(const Hook& hook, const char* name) {
  return std::strcmp(typeid(hook).name(), name) == 0 && PyDict_GET_SIZE(static_cast<const Hooks&>(hook).dict) == 0;
}

bool has_hooks(const at::Tensor& leaf) {
  using torch::autograd::PyFunctionTensorPostAccGradHooks;
  using torch::autograd::PyFunctionTensorPreHook;
  constexpr const char* before = "N5torch8autograd23PyFunctionTensorPreHookE";
  constexpr const char* after = "N5torch8autograd32PyFunctionTensorPostAccGradHooksE";
  for (const auto& hook : impl::hooks(leaf)) {
    if (!were_removed<PyFunctionTensorPreHook>(*hook, before)) return true;
  }
  const auto& later = impl::post_acc_grad_hooks(leaf);
  return later && !were_removed<PyFunctionTensorPostAccGradHooks>(*later, after);
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

// Whether somebody notices when a leaf's gradient is added to its `.grad` without autograd's engine.
bool is_watched(const at::Tensor& leaf) {
  const auto* meta = impl::get_autograd_meta(leaf);
  if (meta == nullptr || (!meta->requires_grad_ && !meta->grad_fn_)) return false;
  if (meta->grad_fn_ || !is_dense(leaf) || leaf.grad_dtype() != leaf.scalar_type() ||
      torch::autograd::AnomalyMode::is_enabled()) {
    return true;
  }
  if ((!meta->hooks_.empty() || meta->post_acc_grad_hooks_) && has_hooks(leaf)) return true;
  if (meta->grad_accumulator_.expired()) return false;
  const auto node = impl::try_get_grad_accumulator(leaf);
  return node && !(node->pre_hooks().empty() && node->post_hooks().empty() && node->retains_grad_hooks().empty());
}

// first_watched(leaves): the first that has a gradient, or whose gradient somebody would notice being made; -1 for none.
PyObject* first_watched(PyObject* const* args) {
  const Items leaves(args[0]);
  for (Py_ssize_t k = 0; k < leaves.size; ++k) {
    const at::Tensor& leaf = leaves.tensor(k);
    const auto* meta = impl::get_autograd_meta(leaf);
    if ((meta != nullptr && meta->grad_.defined()) || is_watched(leaf)) return PyLong_FromSsize_t(k);
  }
  return PyLong_FromLong(-1);
}

// What `contents` walks through. No Python code runs meanwhile, so references are borrowed.
struct Walk {
  const Items before, without;
  std::vector<PyObject*> objects;
  std::vector<int64_t> addresses;

  bool is_left_out(PyObject* key) const {
    return std::any_of(without.items, without.items + without.size, [&](PyObject* each) {
      return key == each || (PyUnicode_CheckExact(key) && PyUnicode_Compare(key, each) == 0);
    });
  }

  void through(PyObject* object, bool is_root = false) {
    objects.push_back(object);
    if (THPVariable_CheckTypeExact(Py_TYPE(object))) {
      addresses.push_back(place_at(*THPVariable_Unpack(object).unsafeGetTensorImpl()));
      return;
    }
    const bool is_dict = PyDict_Check(object);
    if (!is_dict && !PyList_Check(object) && !PyTuple_Check(object)) return;
    if (Py_EnterRecursiveCall(" in containers") != 0) throw python_error();
    const struct Leave {
      ~Leave() { Py_LeaveRecursiveCall(); }
    } leave;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; is_dict && PyDict_Next(object, &at, &key, &value);) {
      objects.push_back(key);
      if (!is_root || !is_left_out(key)) through(value);
    }
    for (Py_ssize_t k = 0; !is_dict && k < PySequence_Fast_GET_SIZE(object); ++k) {
      through(PySequence_Fast_ITEMS(object)[k]);
    }
  }
};

// contents(roots, without, before): a list of all that is in dicts, lists and tuples, and the places (`place_at`) of the
// plain tensors among it (of keys not) as 64-bit integers; of dicts that are roots, without the values of some keys. before
// is an earlier result, or ([], b""): where nothing changed it is returned itself, and where the same objects are there,
// with its list.
PyObject* contents(PyObject* const* args) {
  const Items roots(args[0]), before(args[2]);
  Walk walk{Items(before[0]), Items(args[1])};
  walk.objects.reserve(walk.before.size);
  for (Py_ssize_t k = 0; k < roots.size; ++k) walk.through(roots[k], true);
  const bool same =
      std::equal(walk.objects.begin(), walk.objects.end(), walk.before.items, walk.before.items + walk.before.size);
  Owned addresses(made(bytes_of(walk.addresses)));
  if (same && PyObject_RichCompareBool(addresses.get(), before[1], Py_EQ) == 1) return Py_NewRef(args[2]);
  const auto size = static_cast<Py_ssize_t>(walk.objects.size());
  const auto object = [&](Py_ssize_t k) { return Py_NewRef(walk.objects[k]); };
  Owned list(same ? Py_NewRef(before[0]) : list_of(size, object));
  return PyTuple_Pack(2, list.get(), addresses.get());
}

// Adds gradients to the `.grad` of leaves at the end of `node`, without autograd's engine, which would have a task for each
// (100 small layers on an H100: 3.0 ms a step with this, 3.9 without). It does so where that task would do nothing but call
// `AccumulateGrad`: nothing is hooked on the leaf, no other node leads to it, and it would run on the same stream.
//
// The engine must find no edge to these leaves. It looks for edges as soon as this returns, and then drops what it was
// returned: with that they are edges again, before anything else runs in this thread. Who reads edges from Python has
// the GIL. One leaf is left to the engine, which notes there on which stream gradients were made.
void add_to_leaves(Node& node, variable_list& gradients) {
  struct Taken {  // edges that the node is without as long as this lives
    NodePointer node;
    std::vector<std::pair<size_t, Edge>> edges;
    ~Taken() {
      if (!Py_IsInitialized()) return;
      py::gil_scoped_acquire gil;
      for (auto& [k, edge] : edges) node->next_edges()[k] = std::move(edge);
    }
  };
  const auto stream = node.stream();  // none for a CPU
  const auto has_place = [&](const Edge& edge, const at::Tensor& gradient) {
    auto* leaf_node = dynamic_cast<AccumulateGrad*>(edge.function.get());
    if (leaf_node == nullptr || edge.function.use_count() != 1) return false;
    const at::Tensor &leaf = leaf_node->variable, &before = leaf.grad();
    if (!leaf.requires_grad() || is_watched(leaf)) return false;  // hooks see what is then dropped
    const auto& expected = leaf_node->input_metadata(0);
    return is_dense(gradient) && (!before.defined() || is_dense(before)) && gradient.sizes() == leaf.sizes() &&
        gradient.device() == leaf.device() && gradient.scalar_type() == leaf.scalar_type() &&
        expected.device() == node.device() && (!stream || expected.stream() == *stream);
  };
  std::vector<size_t> found;
  std::vector<const void*> places;  // of gradients that are there
  for (size_t k = 0; k < gradients.size(); ++k) {
    const Edge& edge = node.next_edge(k);
    if (gradients[k].defined() && edge.is_valid() && has_place(edge, gradients[k])) found.push_back(k);
    auto* leaf_node = dynamic_cast<AccumulateGrad*>(edge.function.get());
    if (leaf_node == nullptr || !leaf_node->variable.grad().defined()) continue;
    const at::Tensor& before = leaf_node->variable.grad();
    const bool has_memory = is_dense(before) && before.numel() > 0;
    places.push_back(has_memory ? before.const_data_ptr() : before.unsafeGetTensorImpl());
  }
  // Where leaves have one gradient, the order counts in which theirs are added, and the engine's depends on their number.
  std::sort(places.begin(), places.end());
  if (found.size() < 2 || std::adjacent_find(places.begin(), places.end()) != places.end()) return;
  found.pop_back();  // the one that is left
  for (const size_t k : found) {
    variable_list inputs;
    inputs.push_back(std::exchange(gradients[k], at::Tensor()));
    (*node.next_edge(k).function)(std::move(inputs));
  }
  const auto taken = std::make_shared<Taken>();
  taken->node = node.getptr();
  taken->edges.reserve(found.size());
  {
    py::gil_scoped_acquire gil;
    for (const size_t k : found) taken->edges.emplace_back(k, std::exchange(node.next_edges()[k], Edge()));
  }
  gradients[found.front()] = at::from_blob(taken.get(), {0}, [taken](void*) {}, at::kByte);
}

// ---- the node

// By value: wrapping leaves a tensor that Python knows where it is, and would keep it for as long as the backward runs.
PyObject* list_of(std::vector<at::Tensor> tensors) {
  return list_of(static_cast<Py_ssize_t>(tensors.size()), [&](Py_ssize_t k) {
    return tensors[k].defined() ? THPVariable_Wrap(std::move(tensors[k])) : Py_NewRef(Py_None);
  });
}

template <class Pointer = NodePointer>
Pointer owner_of(Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(node, [](auto* dead) { deleteNode(dead); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

struct PythonNode : public Node {
  PyObject* run;   // run(rest, saved, grads) -> a list with a gradient or None per input of the forward
                   // run(rest, None, None) raises
  PyObject* rest;  // what else the backward reads

  PythonNode(edge_list&& edges, PyObject* run_, PyObject* rest_)
      : Node(std::move(edges)), run(Py_NewRef(run_)), rest(Py_NewRef(rest_)) {}

  ~PythonNode() override {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(run);
    Py_DECREF(rest);
  }

  virtual variable_list call(variable_list&& grads) = 0;

  variable_list apply(variable_list&& grads) override {
    py::gil_scoped_acquire gil;
    try {
      return call(std::move(grads));
    } catch (python_error& error) {
      error.persist();
      throw;
    }
  }
};

// The edges that lead to tensors. Without the GIL: torch locks a leaf whose node it makes, and asks for the GIL then.
edge_list edges_to(const variable_list& tensors) {
  const py::gil_scoped_release no_gil;
  edge_list edges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) edges.push_back(impl::gradient_edge(tensor));
  }
  return edges;
}

// What gradients end in under `create_graph=True`. Autograd leaves out nodes that lead to nothing that is wanted, one
// that raises among them: so this one leads to all that the gradients depend on.
struct DoubleBackward : public PythonNode {
  using PythonNode::PythonNode;

  std::string name() const override { return "DoubleBackward"; }

  variable_list call(variable_list&&) override {
    PyObject* args[] = {rest, Py_None, Py_None};
    Owned nothing(made(PyObject_Vectorcall(run, args, 3, nullptr)));
    fail(PyExc_RuntimeError, "double backward is not supported");
  }
};

struct CompiledFunctionBackward : public PythonNode {
  using PythonNode::PythonNode;

  std::vector<int64_t> wanted;  // positions of the gradients that the edges get
  struct Saved {
    std::vector<SavedVariable> checked;  // for writes
    std::vector<at::Tensor> unchecked;
  };
  std::shared_ptr<Saved> saved;     // none once it was released; hooks that unpack let other threads do so meanwhile
  size_t num_saved = 0;
  std::atomic<size_t> num_calls{0};  // a graph that is retained may be gone through by two threads at the same time
  std::string shown;                 // what it is called

  std::string name() const override { return shown; }

  void release_variables() override {
    std::shared_ptr<Saved> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(saved);
  }

  std::shared_ptr<Saved> saved_now() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return saved;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(
        false,
        "compiled autograd was turned on for a backward whose forward ran without it: set "
        "torch._dynamo.config.compiled_autograd before the function is compiled");
  }

  variable_list apply(variable_list&& grads) override {
    variable_list out = PythonNode::apply(std::move(grads));
    if (may_add_to_leaves()) add_to_leaves(*this, out);
    return out;
  }

  // Whether this is the one call of this node, by a backward that adds gradients to the `.grad` of all leaves and is watched
  // by nobody. User code may call a node by itself, in a backward of something else, too. A hook that the engine calls before
  // it calls this may call it, too, and keep all. Another thread may look at the edges where the graph may be gone through
  // again; it can't be once what was saved is dropped.
  bool may_add_to_leaves() {
    const auto* named = torch::autograd::get_current_graph_task_exec_info();
    return named != nullptr && named->empty() && torch::autograd::get_current_node().get() == this &&
        num_calls == 1 && !torch::autograd::get_current_graph_task_keep_graph() && num_saved > 0 && !saved_now() &&
        post_hooks().empty() && pre_hooks().empty() && tensor_pre_hooks().empty() && !at::GradMode::is_enabled() &&
        !torch::autograd::AnomalyMode::is_enabled() && !c10::impl::TorchDispatchModeTLS::any_modes_set();
  }

  // Returns what the edges get.
  variable_list call(variable_list&& grads) override {
    ++num_calls;
    std::shared_ptr<Saved> reads = saved_now();
    TORCH_CHECK(reads || num_saved == 0, torch::autograd::ERR_BACKWARD_TWICE);
    variable_list values;
    const NodePointer self = getptr();
    if (reads) {
      const py::gil_scoped_release no_gil;  // as in `edges_to`
      for (const SavedVariable& variable : reads->checked) values.push_back(variable.unpack(self));
      values.insert(values.end(), reads->unchecked.begin(), reads->unchecked.end());
      reads.reset();
    }
    if (!torch::autograd::get_current_graph_task_keep_graph()) release_variables();
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) grads[i] = input_metadata(i).zeros_like();
    }
    const bool is_graph_wanted = at::GradMode::is_enabled();  // create_graph=True
    edge_list sources;  // all that the gradients depend on
    if (is_graph_wanted) {
      sources = next_edges();
      const edge_list more = edges_to(grads);
      sources.insert(sources.end(), more.begin(), more.end());
    }
    Owned saved_list(list_of(std::move(values))), grad_list(list_of(std::move(grads)));
    PyObject* args[] = {rest, saved_list.get(), grad_list.get()};
    Owned result(made(PyObject_Vectorcall(run, args, 3, nullptr)));  // which empties the lists
    const Items found(result.get());
    variable_list out;
    for (const int64_t position : wanted) {
      out.push_back(Py_IsNone(found[position]) ? at::Tensor() : found.tensor(position));
    }
    if (is_graph_wanted) refuse_more(std::move(sources), out);
    return out;
  }

  void refuse_more(edge_list&& sources, variable_list& gradients) const {
    auto& node = *new DoubleBackward(std::move(sources), run, rest);
    const NodePointer pointer = owner_of(&node);
    for (at::Tensor& gradient : gradients) {
      if (!gradient.defined() || gradient.requires_grad()) continue;
      gradient = gradient.tensor_data();
      impl::set_gradient_edge(gradient, Edge(pointer, node.add_input_metadata(gradient)));
    }
  }
};

// attach(run, rest, inputs, wanted, outputs, differentiable, checked, unchecked, name) puts a node between tensors.
// run: run(rest, saved, grads) returns a list with a gradient, or None, for each of inputs; it gets two lists that it may
//     empty: what was saved, and a gradient for each differentiable output, zeros where nothing gave one. With None for
//     both it raises: that is called where gradients that were taken under create_graph=True are differentiated.
// rest: What else the backward reads, for run.
// inputs: A list or tuple.
// wanted: Positions of the inputs that get gradients.
// outputs: A list. An output that is a view or requires grad already is replaced in it.
// differentiable: Positions of the outputs that get the node.
// checked: Tensors to be saved; that they were written in the meantime is an error, as for torch's own operators.
// unchecked: Tensors to be saved without that.
// name: What the node is called.
PyObject* attach(PyObject* const* args) {
  const Items inputs(args[2]), positions(args[3]), outputs(args[4]), differentiable(args[5]);
  const Items checked(args[6]), unchecked(args[7]);
  const char* name = PyUnicode_AsUTF8(args[8]);
  if (name == nullptr) throw python_error();
  std::vector<int64_t> wanted;
  variable_list sources;
  for (Py_ssize_t k = 0; k < positions.size; ++k) {
    wanted.push_back(positions.number(k));
    sources.push_back(inputs.tensor(wanted.back()));
  }
  auto& node = *new CompiledFunctionBackward(edges_to(sources), args[0], args[1]);
  const NodePointer pointer = owner_of(&node);
  node.shown = name;
  node.wanted = std::move(wanted);
  node.num_saved = checked.size + unchecked.size;

  std::vector<at::Tensor> results;
  for (Py_ssize_t k = 0; k < differentiable.size; ++k) {
    const Py_ssize_t position = differentiable.number(k);
    at::Tensor result = outputs.tensor(position);
    if (result.is_view() || result.requires_grad()) {  // as made by operators outside of a graph
      result = result.tensor_data();
      if (PyList_SetItem(args[4], position, made(THPVariable_Wrap(result))) < 0) throw python_error();
    }
    results.push_back(std::move(result));
  }
  // A saved tensor that is an output, too, would keep its own node alive.
  const auto to_save = [&](const at::Tensor& tensor) {
    const auto is_it = [&](const at::Tensor& result) { return result.is_same(tensor); };
    return std::any_of(results.begin(), results.end(), is_it) ? tensor.tensor_data() : tensor;
  };
  {
    const at::AutoGradMode no_grad(false);
    node.saved = std::make_shared<CompiledFunctionBackward::Saved>();
    variable_list to_check;
    for (Py_ssize_t k = 0; k < checked.size; ++k) to_check.push_back(to_save(checked.tensor(k)));
    for (Py_ssize_t k = 0; k < unchecked.size; ++k) {
      node.saved->unchecked.push_back(to_save(unchecked.tensor(k)));
    }
    const py::gil_scoped_release no_gil;  // as in `edges_to`
    node.saved->checked.reserve(to_check.size());
    for (const at::Tensor& tensor : to_check) node.saved->checked.emplace_back(tensor, /*is_output=*/false);
  }
  for (const at::Tensor& result : results) {
    impl::set_gradient_edge(result, Edge(pointer, node.add_input_metadata(result)));
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
    METHOD(in_transform, 0),
    METHOD(any_held, 2),
    METHOD(any_held_among, 2),
    METHOD(stand_in, 3),
    METHOD(aliases, 2),
    METHOD(views, 2),
    METHOD(copy_out, 2),
    METHOD(fits, 3),
    METHOD(exclusive, 3),
    METHOD(swap_storages, 2),
    METHOD(contents, 3),
    METHOD(first_watched, 1),
    METHOD(attach, 9),
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods};
}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }
