// The node of autograd's graph that stands for a compiled or graphed function: what AOTAutograd's Python `autograd.Function` does,
// without Python per parameter and per saved tensor. Used by node.py, which says what is handed over.

#define AT_PER_OPERATOR_HEADERS  // half the time to compile
#include <Python.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
#define HAS_CREATION_HOOKS
#endif

#include <algorithm>
#include <atomic>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// Source: torch/csrc/autograd/python_variable.h and torch/csrc/Exceptions.h, 2.11 to 2.15, which take 20 s to compile.
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

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(Edge::function);  // shared_ptr in torch 2.11, intrusive_ptr in 2.13

struct PythonErrorSet {};

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

struct WithGIL {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGIL() { PyGILState_Release(state); }
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
  PyObject* at(Py_ssize_t i) const {
    if (i < 0 || i >= size) fail(PyExc_IndexError, "position out of range");
    return items[i];
  }
  Py_ssize_t position(Py_ssize_t i) const {
    const Py_ssize_t number = PyLong_AsSsize_t(at(i));
    if (number == -1 && PyErr_Occurred()) throw PythonErrorSet();
    return number;
  }
};

// By value: wrapping leaves a tensor that Python knows where it is, and would keep it for as long as the backward runs.
PyObject* list_of(std::vector<at::Tensor> tensors) {
  Owned list(PyList_New(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* item = tensors[i].defined() ? THPVariable_Wrap(std::move(tensors[i])) : Py_NewRef(Py_None);
    if (item == nullptr) throw PythonErrorSet();
    PyList_SET_ITEM(list.object, i, item);
  }
  return list.release();
}

// Whether nobody notices when a parameter's gradient is added to its `.grad` without the node that does so.
bool is_unwatched(const at::Tensor& parameter) {
  namespace impl = torch::autograd::impl;
  if (!parameter.is_leaf() || !parameter.requires_grad() ||
      parameter.unsafeGetTensorImpl()->is_python_dispatch() ||
      parameter.grad_dtype() != parameter.scalar_type() ||
      torch::autograd::AnomalyMode::is_enabled()) {
    return false;
  }
  if (!impl::hooks(parameter).empty() || impl::post_acc_grad_hooks(parameter)) return false;
  const auto accumulator = impl::try_get_grad_accumulator(parameter);
  return !accumulator || (accumulator->pre_hooks().empty() && accumulator->post_hooks().empty() &&
                          accumulator->retains_grad_hooks().empty());
}

using torch::autograd::AccumulateGrad;

at::Tensor in_type_of_grad(const at::Tensor& parameter, const at::Tensor& gradient) {
  const std::optional<at::ScalarType> type = parameter.grad_dtype();
  return type ? gradient.to(*type) : gradient;
}

using Additions = std::vector<std::pair<at::Tensor, at::Tensor>>;  // parameters, and their gradients

// By the node that every backward adds through, which lets one thread add at a time, with what comes with it: the type of
// `.grad`, and hooks that came since the forward. Without the GIL, since who adds at the same time may want it.
void add_to_grads(Additions&& additions) {
  for (auto& [parameter, gradient] : additions) {
    if (!gradient.defined() || !parameter.requires_grad()) continue;  // it may have been frozen since the forward
    if (parameter.grad_dtype() != gradient.scalar_type()) gradient = in_type_of_grad(parameter, gradient);
    const auto node = torch::autograd::impl::grad_accumulator(parameter);
    variable_list inputs;
    inputs.push_back(std::move(gradient));
    for (const auto& hook : node->tensor_pre_hooks()) inputs = (*hook)(inputs);
    for (const auto& hook : node->pre_hooks()) inputs = (*hook)(inputs);
    if (node->post_hooks().empty()) {
      (*node)(std::move(inputs));
      continue;
    }
    variable_list outputs = (*node)(variable_list(inputs));
    for (const auto& hook : node->post_hooks()) outputs = (*hook)(outputs, inputs);
  }
}

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
  using Parameters = std::vector<std::pair<Py_ssize_t, at::Tensor>>;
  Parameters direct;  // parameters without an edge, and where their gradients are
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

  // Parameters go with what was saved: whoever still holds a result has a hold on none of them.
  void release_variables() override {
    std::shared_ptr<Saved> dropped;
    Parameters parameters;
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(saved);
    if (num_saved > 0 || runs_once) parameters.swap(direct);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(
        false,
        "compiled autograd was turned on for a backward whose forward ran without it: set "
        "torch._dynamo.config.compiled_autograd before the function is compiled");
  }

  variable_list apply(variable_list&& grads) override {
    variable_list out;
    Additions direct_ones;
    {
      WithGIL gil;
      try {
        out = call(std::move(grads), direct_ones);
      } catch (const PythonErrorSet&) {
        throw python_error();
      }
    }
    add_to_grads(std::move(direct_ones));
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

  // Returns what the edges get; `direct_ones` is given the parameters that have none.
  variable_list call(variable_list&& grads, Additions& direct_ones) {
    ++num_calls;
    std::shared_ptr<Saved> reads;
    Parameters parameters;
    {  // at once: what another thread releases meanwhile goes together
      const std::lock_guard<std::mutex> lock(mutex_);
      reads = saved;
      parameters = direct;
    }
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
    edge_list sources = is_graph_wanted ? sources_with(grads, parameters) : edge_list();
    if (!adds_to_leaves()) parameters.clear();
    Owned saved_list(list_of(std::move(values)));
    Owned grad_list(list_of(std::move(grads)));
    PyObject* args[] = {rest, saved_list.object, grad_list.object};
    variable_list out, gradients;
    {
      const Owned result(PyObject_Vectorcall(run, args, 3, nullptr));  // which empties the lists
      const Items found(result.object);
      const auto gradient = [&](Py_ssize_t position) {
        PyObject* item = found.at(position);
        return item == Py_None ? at::Tensor() : tensor_of(item);
      };
      out.reserve(wanted.size());
      for (const Py_ssize_t position : wanted) out.push_back(gradient(position));
      gradients.reserve(parameters.size());
      for (const auto& [position, _] : parameters) gradients.push_back(gradient(position));
    }
    if (is_graph_wanted) refuse_more(std::move(sources), {&out, &gradients});
    for (size_t k = 0; k < parameters.size(); ++k) {
      direct_ones.emplace_back(std::move(parameters[k].second), std::move(gradients[k]));
    }
    return out;
  }

  // Where all leads that the gradients depend on.
  edge_list sources_with(const variable_list& grads, const Parameters& parameters) const {
    edge_list edges = next_edges();
    const auto add = [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.requires_grad()) {
        edges.push_back(torch::autograd::impl::gradient_edge(tensor));
      }
    };
    for (const auto& [_, parameter] : parameters) add(parameter);
    for (const at::Tensor& grad : grads) add(grad);
    return edges;
  }

  void refuse_more(edge_list&& sources, std::initializer_list<variable_list*> found) const {
    auto& node = *new DoubleBackward(std::move(sources), run, rest);
    const NodePointer pointer = owner_of<NodePointer>(&node);
    for (variable_list* gradients : found) {
      for (at::Tensor& gradient : *gradients) {
        if (!gradient.defined() || gradient.requires_grad()) continue;
        gradient = gradient.tensor_data();
        const uint32_t number = node.add_input_metadata(gradient);
        torch::autograd::impl::set_gradient_edge(gradient, Edge(pointer, number));
      }
    }
  }

 public:
  size_t num_saved = 0;
};

// attach(run, rest, inputs, wanted, direct, outputs, differentiable, checked, unchecked, name, materialize, once) -> None
PyObject* attach(PyObject* const* args) {
  const Items inputs(args[2]), wanted(args[3]), candidates(args[4]), differentiable(args[6]);
  const Items checked(args[7]), unchecked(args[8]);
  if (!PyList_Check(args[5])) fail(PyExc_TypeError, "outputs: expected a list");
  const char* name = PyUnicode_AsUTF8(args[9]);
  if (name == nullptr) throw PythonErrorSet();
  const Items outputs(args[5]);
  edge_list edges;
  std::vector<Py_ssize_t> positions;
  CompiledFunctionBackward::Parameters direct;
  const auto add_edge = [&](Py_ssize_t position, const at::Tensor& tensor) {
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    positions.push_back(position);
  };
  edges.reserve(wanted.size);
  for (Py_ssize_t k = 0; k < wanted.size; ++k) {
    add_edge(wanted.position(k), tensor_of(inputs.at(wanted.position(k))));
  }
  for (Py_ssize_t k = 0; k < candidates.size; ++k) {
    const Py_ssize_t position = candidates.position(k);
    const at::Tensor& tensor = tensor_of(inputs.at(position));
    if (is_unwatched(tensor)) {
      direct.emplace_back(position, tensor);
    } else {
      add_edge(position, tensor);
    }
  }
  auto& node = *new CompiledFunctionBackward(
      std::move(edges), args[0], args[1], name, args[10] == Py_True, args[11] == Py_True);
  const NodePointer pointer = owner_of<NodePointer>(&node);
  node.wanted = std::move(positions);
  node.direct = std::move(direct);
  node.num_saved = checked.size + unchecked.size;

  std::vector<at::Tensor> results;
  results.reserve(differentiable.size);
  for (Py_ssize_t k = 0; k < differentiable.size; ++k) {
    const Py_ssize_t position = differentiable.position(k);
    at::Tensor result = tensor_of(outputs.at(position));
    if (result.is_view() || result.requires_grad()) {  // as made by operators that ran plainly
      result = result.tensor_data();
      PyObject* made = THPVariable_Wrap(at::Tensor(result));
      if (made == nullptr) throw PythonErrorSet();
      if (PyList_SetItem(args[5], position, made) < 0) throw PythonErrorSet();
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
    torch::autograd::impl::set_gradient_edge(result, Edge(pointer, number));
  }
#ifdef HAS_CREATION_HOOKS
  torch::autograd::fire_node_creation_hooks(pointer);
#endif
  return Py_NewRef(Py_None);
}

template <class Pointer>
struct WeakOf {
  using type = c10::weak_intrusive_ptr<typename Pointer::element_type>;
};
template <class T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};

// drop_accumulators(leaves) -> None
PyObject* drop_accumulators(PyObject* const* args) {
  namespace impl = torch::autograd::impl;
  const Items leaves(args[0]);
  for (Py_ssize_t k = 0; k < leaves.size; ++k) {
    const at::Tensor& leaf = tensor_of(leaves.items[k]);
    if (!leaf.is_leaf() || !leaf.requires_grad()) continue;
    const auto node = impl::try_get_grad_accumulator(leaf);
    if (node && node->pre_hooks().empty() && node->post_hooks().empty()) {
      impl::set_grad_accumulator(leaf, WeakOf<NodePointer>::type(NodePointer()));
    }
  }
  return Py_NewRef(Py_None);
}

template <PyObject* (*function)(PyObject* const*), Py_ssize_t num_args>
PyObject* checked(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != num_args) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", num_args, n);
    return nullptr;
  }
  try {
    return function(args);
  } catch (const PythonErrorSet&) {
    return nullptr;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyMethodDef methods[] = {
    {"attach", reinterpret_cast<PyCFunction>(checked<attach, 12>), METH_FASTCALL, nullptr},
    {"drop_accumulators", reinterpret_cast<PyCFunction>(checked<drop_accumulators, 1>), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_node", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__node() { return PyModule_Create(&module); }
