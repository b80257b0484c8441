// Calls like an earlier one, from tensors to launches without Python.
//
// This is `lln.kernels.lln.repeats` in C++, for one purpose: at batch 1 Python takes longer to ask
// for the kernels than the GPU takes to run them. Python decides everything once: it hands over the
// launches of a kind of call as plain numbers (`lln.kernels.launching.plain_launches`), and `learn`
// keeps them by what decides them. `attend` then recognises such a call by itself, allocates, fills in
// addresses and launches; it answers None to whatever is unusual, and Python takes over.
//
// Nothing here knows CUDA: the functions of the driver come as addresses (`configure`), so that
// the file compiles against any torch, and tests can put a driver of their own in their place.
//
// All that Python can change is read and written with the GIL held; allocating and launching
// happens without it.

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/ExpandUtils.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided_ops.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// As in `lln.kernels.launching.operators.once_differentiable`.
constexpr const char* NO_SECOND =
    "lln's fused kernels have no second derivative; use impl='eager'.";
// As `lln.functional.prepared_calls.MOST_LAYOUTS`; beyond it all are dropped, and learned again
// when needed.
constexpr size_t MOST_KINDS = 4096;
constexpr size_t MOST_CELLS = 128;
constexpr size_t MOST_SLOTS = 64;

// The fields of `lln.checks.call.Call` that are read here, by their names: `configure` asks
// the class where they stand.
#define LLN_FIELDS(X)                                                                      \
  X(kind) X(query) X(key) X(value) X(alpha) X(beta) X(matching) X(mix) X(block_size) X(scale) \
  X(key_mask) X(dropout_p) X(is_causal) X(bounds)

// The arguments of kernels that differ from call to call, by their names there: `slot_names` tells
// Python where they stand.
#define LLN_SLOTS(X)                                                                          \
  X(p_q) X(p_k) X(p_v) X(p_alpha) X(p_beta) X(p_mask) X(p_starts) X(alpha) X(beta) X(mix)     \
  X(seed) X(p_m) X(p_o) X(p_g) X(p_log_mass) X(p_centroid) X(p_dq) X(p_dk) X(p_dv)            \
  X(p_dalpha) X(p_dbeta) X(p_dmix) X(p_results)

#define LLN_MEMBER(name) Py_ssize_t name = -1;
struct Fields {
  LLN_FIELDS(LLN_MEMBER)
  // All other fields, and the defaults that they must have: what is not known here is unusual.
  std::vector<std::pair<Py_ssize_t, PyObject*>> others;
};
#undef LLN_MEMBER

#define LLN_ENTRY(name) name,
namespace slot {
enum Name : size_t { LLN_SLOTS(LLN_ENTRY) COUNT };
} // namespace slot
#undef LLN_ENTRY

#define LLN_WORD(name) #name,
constexpr const char* SLOT_NAMES[] = {LLN_SLOTS(LLN_WORD)};
#undef LLN_WORD

// The functions of the driver, with its types as plain ones: a status of 0 is success.
struct LaunchAttribute {
  int id;
  alignas(8) int value;
  char rest[60];
};
static_assert(sizeof(LaunchAttribute) == 72, "as the driver has it");
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56, "as the driver has it");
using Launch =
    int (*)(const LaunchConfig* config, void* function, void** parameters, void** extra);
// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: `lln.kernels.launching.triton_order`.
constexpr LaunchAttribute FOLLOWING = {6, 1, {}};
using StreamOf = int (*)(int32_t device, void** stream);
using CurrentContext = int (*)(void** context);
using DeviceOf = int (*)(int* device, int ordinal);
using RetainContext = int (*)(void** context, int device);
using SetContext = int (*)(void* context);

// Holds the GIL for a while, in whatever thread.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  ~Gil() {
    PyGILState_Release(state_);
  }

 private:
  PyGILState_STATE state_;
};

// Lets other threads have the GIL for a while.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;
  ~NoGil() {
    PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

struct Settings {
  at::DeviceType device = at::DeviceType::CUDA;
  Launch launch = nullptr;
  StreamOf stream_of = nullptr;
  CurrentContext current_context = nullptr;
  DeviceOf device_of = nullptr;
  RetainContext retain_context = nullptr;
  SetContext set_context = nullptr;
  // Who watches calls: `lln.observers`, `lln.kernels.launching.sizes.overrides`, Triton's launch
  // hooks.
  PyObject* observers = nullptr;
  PyObject* overrides = nullptr;
  PyObject* runtime = nullptr;
  // Takes over a backward pass that has no launches here.
  PyObject* long_way = nullptr;
  // The class of calls, and where its fields stand.
  PyObject* call_type = nullptr;
  Fields fields;
};

// What a launch depends on, as numbers: shapes, strides, types, alignment, options.
class Key {
 public:
  void add(int64_t field) {
    fields_[count_++] = field;
    hash_ = (hash_ ^ static_cast<uint64_t>(field)) * 0x9E3779B97F4A7C15ull;
    hash_ ^= hash_ >> 29;
  }

  // The same as `lln.kernels.launching.shapes.layout_of`. At most four dimensions.
  void look(const Tensor& side) {
    const auto sizes = side.sizes();
    const auto strides = side.strides();
    const auto place = reinterpret_cast<uintptr_t>(side.data_ptr());
    const auto dimensions = static_cast<int64_t>(sizes.size());
    add(dimensions | (static_cast<int64_t>(side.scalar_type()) << 8) |
        (static_cast<int64_t>(place % 16) << 16));
    for (const auto size : sizes) {
      add(size);
    }
    for (const auto stride : strides) {
      add(stride);
    }
  }

  bool operator==(const Key& other) const {
    return hash_ == other.hash_ && count_ == other.count_ &&
        std::memcmp(fields_.data(), other.fields_.data(), count_ * sizeof(int64_t)) == 0;
  }

  struct Hash {
    size_t operator()(const Key& key) const {
      return static_cast<size_t>(key.hash_);
    }
  };

 private:
  // Seven tensors with nine fields each, and a few options.
  std::array<int64_t, 80> fields_;
  size_t count_ = 0;
  uint64_t hash_ = 0;
};

// An argument that differs from call to call: an address, a whole number, or a real one.
union Slot {
  uint64_t address;
  double number;
};

// How a slot is written into a cell.
enum class Form : char { whole = 'p', single = 'f', real = 'd' };

struct Fill {
  uint32_t cell;
  uint32_t slot;
  Form form;
};

// One launch. Every parameter of the kernel has a cell of eight bytes and stands at its beginning.
struct Step {
  void* function;
  std::array<unsigned, 3> grid;
  unsigned threads;
  unsigned shared;
  // Whether the kernel waits for the launch before by itself.
  unsigned follows;
  std::vector<uint64_t> cells;
  std::vector<Fill> fills;
};

// The launches of a pass. Their own memory is one allocation; its parts are the last slots.
struct Launches {
  int64_t bytes;
  std::vector<int64_t> offsets;
  std::vector<Step> steps;
};

using LaunchesPointer = std::shared_ptr<const Launches>;

// A kind of call: `lln.kernels.lln.repeats.Repeat`.
struct Plan {
  PyObject* repeat = nullptr;
  LaunchesPointer matching;
  LaunchesPointer forward;
  at::Device device{at::DeviceType::CPU};
  bool tracked = false;
  // Whether the summary is kept for a backward pass, and its slots per sample.
  bool keeps = false;
  int64_t slots = 0;
  // By how the gradient of the output and the saved tensors lie in memory.
  std::unordered_map<Key, LaunchesPointer, Key::Hash> backwards;

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    // The last owner may be a node that autograd drops in another thread.
    if (repeat != nullptr && Py_IsInitialized()) {
      const Gil gil;
      Py_DECREF(repeat);
    }
  }
};

using PlanPointer = std::shared_ptr<Plan>;

// Never destroyed: at the end of the process Python is gone before static objects are.
Settings& settings() {
  static auto* const kept = new Settings();
  return *kept;
}

std::unordered_map<Key, PlanPointer, Key::Hash>& plans() {
  static auto* const kept = new std::unordered_map<Key, PlanPointer, Key::Hash>();
  return *kept;
}

// ---- What may be launched this way ----

// Whether no transform, mode, tracer or compiler has to see the operators of this thread.
bool is_unwatched() {
  static const uint64_t usual =
      DispatchKeySet({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView}).raw_repr();
  const auto included = c10::impl::tls_local_dispatch_key_set().included_.raw_repr();
  return (included & ~usual) == 0 && at::impl::PythonTorchFunctionTLS::stack_len() == 0;
}

// Whether it is a dense array on the right kind of device, and nothing else.
bool is_plain(const Tensor& side, const at::Device& device) {
  static const uint64_t usual = DispatchKeySet({
                                    DispatchKey::CPU,
                                    DispatchKey::CUDA,
                                    DispatchKey::AutogradCPU,
                                    DispatchKey::AutogradCUDA,
                                    DispatchKey::AutocastCPU,
                                    DispatchKey::AutocastCUDA,
                                    DispatchKey::ADInplaceOrView,
                                })
                                    .raw_repr();
  return (side.key_set().raw_repr() & ~usual) == 0 && side.layout() == at::kStrided &&
      side.device() == device && side.dim() <= 4;
}

bool has_tangent(const Tensor& side) {
  return side._fw_grad(0).defined();
}

// Whether a hook of Triton is set: `lln.kernels.launching.recipes.launches_are_watched`.
bool is_hooked(PyObject* name, PyObject* calls_name) {
  PyObject* hook = PyObject_GetAttr(settings().runtime, name);
  if (hook == nullptr) {
    PyErr_Clear();
    return true;
  }
  if (hook == Py_None) {
    Py_DECREF(hook);
    return false;
  }
  PyObject* calls = PyObject_GetAttr(hook, calls_name);
  if (calls == nullptr) {
    PyErr_Clear();
    calls = Py_NewRef(hook);
  }
  const int found = PyObject_IsTrue(calls);
  PyErr_Clear();
  Py_DECREF(calls);
  Py_DECREF(hook);
  return found != 0;
}

// Whether launches go to the current device, and nobody listens to them; needs the GIL.
bool is_free(const at::Device& device) {
  static PyObject* const enter = PyUnicode_InternFromString("launch_enter_hook");
  static PyObject* const leave = PyUnicode_InternFromString("launch_exit_hook");
  static PyObject* const calls = PyUnicode_InternFromString("calls");
  if (PyDict_GET_SIZE(settings().overrides) != 0 || is_hooked(enter, calls) ||
      is_hooked(leave, calls)) {
    return false;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getDevice() == device;
}

// ---- Memory and launches ----

Tensor room(
    at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, const at::Device& device) {
  // Straight to the device's own function: nothing watches, and no gradient flows.
  const auto key = device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
  return at::_ops::empty_strided::redispatch(
      DispatchKeySet(key), c10::fromIntArrayRefSlow(sizes), c10::fromIntArrayRefSlow(strides),
      type, at::kStrided, device, false);
}

// Lies in memory as `torch.empty_like` has it: without the gaps of a part of a larger tensor.
Tensor alike(const Tensor& side) {
  if (side.is_non_overlapping_and_dense()) {
    return room(side.sizes(), side.strides(), side.scalar_type(), side.device());
  }
  const auto strides = at::infer_dense_strides(side.sizes(), side.strides());
  return room(side.sizes(), strides, side.scalar_type(), side.device());
}

uint64_t address_of(const Tensor& side) {
  return reinterpret_cast<uint64_t>(side.data_ptr());
}

// What is not there is never read, but the kernels take an address.
uint64_t address_of(const Tensor& side, uint64_t otherwise) {
  return side.defined() ? address_of(side) : otherwise;
}

void succeed(int status, const char* what) {
  TORCH_CHECK(
      status == 0, "lln's compiled launcher: ", what, " failed with error ", status,
      "; LLN_LAUNCHER=python does without it.");
}

// A thread that autograd has started may not have touched the device yet.
void enter_context(const at::Device& device) {
  const auto& set = settings();
  void* context = nullptr;
  if (set.current_context == nullptr || (set.current_context(&context) == 0 && context)) {
    return;
  }
  int number = 0;
  succeed(set.device_of(&number, device.index()), "cuDeviceGet");
  succeed(set.retain_context(&context, number), "cuDevicePrimaryCtxRetain");
  succeed(set.set_context(context), "cuCtxSetCurrent");
}

void run(const Launches& launches, Slot* slots, const at::Device& device) {
  Tensor space;
  if (launches.bytes > 0) {
    space = room({launches.bytes}, {1}, at::kByte, device);
    const auto begin = address_of(space);
    for (size_t part = 0; part < launches.offsets.size(); ++part) {
      slots[slot::COUNT + part].address = begin + launches.offsets[part];
    }
  }
  void* stream = nullptr;
  succeed(settings().stream_of(device.index(), &stream), "finding the current stream");
  enter_context(device);
  std::array<uint64_t, MOST_CELLS> cells;
  std::array<void*, MOST_CELLS> parameters;
  for (const auto& step : launches.steps) {
    std::memcpy(cells.data(), step.cells.data(), step.cells.size() * sizeof(uint64_t));
    for (const auto& fill : step.fills) {
      const Slot& slot = slots[fill.slot];
      if (fill.form == Form::single) {
        const auto number = static_cast<float>(slot.number);
        std::memcpy(&cells[fill.cell], &number, sizeof(number));
      } else {
        std::memcpy(&cells[fill.cell], &slot, sizeof(slot));
      }
    }
    for (size_t cell = 0; cell < step.cells.size(); ++cell) {
      parameters[cell] = &cells[cell];
    }
    const LaunchConfig config = {
        {step.grid[0], step.grid[1], step.grid[2]},
        {step.threads, 1, 1},
        step.shared,
        stream,
        &FOLLOWING,
        step.follows};
    succeed(
        settings().launch(&config, step.function, parameters.data(), nullptr), "cuLaunchKernelEx");
  }
}

// ---- Calls ----

// What `attend` and `learn` read from their arguments. Tensors belong to the caller.
struct Call {
  Tensor query, key, value, alpha, beta, mask;
  double alpha_number = 1.0;
  double beta_number = 1.0;
  double mix = 1.0;
  bool tracked = false;
  Key kind;
};

// What forward and backward share. What is not there is never read: it has the address of query.
void fill_shared(const Call& call, Slot* slots) {
  const auto begin = address_of(call.query);
  slots[slot::p_q].address = begin;
  slots[slot::p_k].address = address_of(call.key);
  slots[slot::p_v].address = address_of(call.value);
  slots[slot::p_alpha].address = address_of(call.alpha, begin);
  slots[slot::p_beta].address = address_of(call.beta, begin);
  slots[slot::p_mask].address = address_of(call.mask, begin);
  slots[slot::p_starts].address = begin;
  slots[slot::alpha].number = call.alpha_number;
  slots[slot::beta].number = call.beta_number;
  slots[slot::mix].number = call.mix;
  slots[slot::seed].address = 0;
}

// Torch has changed how nodes are owned; a template, so that only one branch is compiled.
template <class Made, class Pointer, class... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    // Torch's own function to delete a node: it does not recurse into long graphs.
    return Pointer(
        new Made(std::forward<Arguments>(arguments)...), [](Made* made) { deleteNode(made); });
  } else {
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
  }
}

using NodePointer = decltype(torch::autograd::Edge::function);

// What a backward pass needs, as `lln.kernels.lln.lln_ops.ORDINARY` keeps it: hooks see the same
// tensors.
struct AttendBackward : public Node {
  PlanPointer plan;
  double alpha_number = 1.0;
  double beta_number = 1.0;
  double mix = 1.0;
  // Query, key, value, α, β, mask, log-mass, centroid.
  std::array<SavedVariable, 8> saved;

  std::string name() const override {
    return "LLNAttendBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& side : saved) {
      side.reset_data();
    }
  }

  variable_list apply(variable_list&& gradients) override;
};

// Output, and where a backward pass follows its node.
Tensor forward(const PlanPointer& plan, Call& call) {
  RECORD_FUNCTION("lln::attend_again", std::vector<c10::IValue>());
  const auto& query = call.query;
  const auto& device = plan->device;
  const auto batch = query.size(0), heads = query.size(1), tokens = query.size(2);
  const auto width = call.value.size(3);
  std::array<Slot, MOST_SLOTS> slots;
  Tensor results, log_mass, centroid;
  fill_shared(call, slots.data());
  if (plan->matching) {
    results = room({5, batch, heads, 1, 1}, {batch * heads, heads, 1, 1, 1}, at::kFloat, device);
    slots[slot::p_results].address = address_of(results);
    run(*plan->matching, slots.data(), device);
    slots[slot::p_alpha].address = address_of(results);
    slots[slot::p_beta].address = address_of(results) + batch * heads * sizeof(float);
    if (call.tracked) {
      at::AutoDispatchBelowADInplaceOrView below;
      call.alpha = results.select(0, 0);
      call.beta = results.select(0, 1);
    }
  }
  // As `lln.kernels.launching.shapes.output_like`.
  const bool by_token = query.stride(1) < query.stride(2);
  const auto plane = by_token ? width : tokens * width;
  const auto row = by_token ? heads * width : width;
  const Tensor out = room(
      {batch, heads, tokens, width}, {heads * tokens * width, plane, row, 1}, query.scalar_type(),
      device);
  if (plan->keeps) {
    const auto features = query.size(3);
    const auto part = plan->slots * features;
    log_mass = room(
        {batch, plan->slots, features}, {part, features, 1}, at::kFloat, device);
    centroid = room(
        {batch, plan->slots, features, width}, {part * width, features * width, width, 1},
        call.value.scalar_type(), device);
  }
  slots[slot::p_m].address = slots[slot::p_o].address = address_of(out);
  slots[slot::p_log_mass].address = address_of(log_mass, address_of(query));
  slots[slot::p_centroid].address = address_of(centroid, address_of(query));
  run(*plan->forward, slots.data(), device);
  if (!call.tracked) {
    return out;
  }
  auto node = make_node<AttendBackward, NodePointer>();
  auto& own = static_cast<AttendBackward&>(*node);
  own.plan = plan;
  own.alpha_number = call.alpha_number;
  own.beta_number = call.beta_number;
  own.mix = call.mix;
  const std::array<Tensor, 8> sides = {
      query, call.key, call.value, call.alpha, call.beta, call.mask, log_mass, centroid};
  for (size_t side = 0; side < sides.size(); ++side) {
    own.saved[side] = SavedVariable(sides[side], false);
  }
  own.set_next_edges(torch::autograd::collect_next_edges(query, call.key, call.value));
  torch::autograd::set_history(out, node);
  return out;
}

[[noreturn]] void throw_from_python() {
  python_error error;
  error.persist();
  throw error;
}

const char* const LAUNCHES = "lln launches";

LaunchesPointer launches_in(PyObject* capsule) {
  auto* const held =
      static_cast<LaunchesPointer*>(PyCapsule_GetPointer(capsule, LAUNCHES));
  if (held == nullptr) {
    throw_from_python();
  }
  return *held;
}

PyObject* wrapped(const Tensor& side) {
  return side.defined() ? THPVariable_Wrap(side) : Py_NewRef(Py_None);
}

// The gradients by `settings().long_way`, which may return launches for the next time.
variable_list by_the_long_way(
    Plan& plan, const Call& call, const Tensor& gradient, const Tensor& log_mass,
    const Tensor& centroid, const Key* looks) {
  const Gil gil;
  PyObject* found = PyObject_CallFunction(
      settings().long_way, "ON(NNNNNN)(ddd)(NN)", plan.repeat, wrapped(gradient),
      wrapped(call.query), wrapped(call.key), wrapped(call.value), wrapped(call.alpha),
      wrapped(call.beta), wrapped(call.mask), call.alpha_number, call.beta_number, call.mix,
      wrapped(log_mass), wrapped(centroid));
  if (found == nullptr) {
    throw_from_python();
  }
  const pybind11::object kept = pybind11::reinterpret_steal<pybind11::object>(found);
  TORCH_CHECK(PyTuple_Check(found) && PyTuple_GET_SIZE(found) == 4, "four results are expected");
  variable_list made;
  for (Py_ssize_t place = 0; place < 3; ++place) {
    made.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(found, place)));
  }
  PyObject* const capsule = PyTuple_GET_ITEM(found, 3);
  if (looks != nullptr && capsule != Py_None) {
    plan.backwards.emplace(*looks, launches_in(capsule));
  }
  return made;
}

variable_list differentiate(
    Plan& plan, const Call& call, const Tensor& gradient, const Tensor& log_mass,
    const Tensor& centroid) {
  bool usual = is_unwatched();
  for (const auto* side :
       {&gradient, &call.query, &call.key, &call.value, &call.alpha, &call.beta, &call.mask,
        &log_mass, &centroid}) {
    usual = usual && (!side->defined() || is_plain(*side, plan.device));
  }
  // The kernels read what the forward pass kept as it wrote it.
  usual = usual && (!log_mass.defined() || log_mass.is_contiguous()) &&
      (!centroid.defined() || centroid.is_contiguous());
  if (!usual) {
    return by_the_long_way(plan, call, gradient, log_mass, centroid, nullptr);
  }
  Key looks;
  for (const auto* side :
       {&gradient, &call.query, &call.key, &call.value, &call.alpha, &call.beta, &call.mask}) {
    if (side->defined()) {
      looks.look(*side);
    } else {
      looks.add(-1);
    }
  }
  LaunchesPointer launches;
  {
    const Gil gil;
    if (is_free(plan.device)) {
      const auto found = plan.backwards.find(looks);
      launches = found == plan.backwards.end() ? nullptr : found->second;
    }
  }
  if (!launches) {
    return by_the_long_way(plan, call, gradient, log_mass, centroid, &looks);
  }
  variable_list made = {alike(call.query), alike(call.key), alike(call.value)};
  std::array<Slot, MOST_SLOTS> slots;
  fill_shared(call, slots.data());
  const auto begin = address_of(gradient);
  slots[slot::p_m].address = slots[slot::p_g].address = begin;
  slots[slot::p_log_mass].address = address_of(log_mass, begin);
  slots[slot::p_centroid].address = address_of(centroid, begin);
  slots[slot::p_dq].address = address_of(made[0]);
  slots[slot::p_dk].address = address_of(made[1]);
  slots[slot::p_dv].address = address_of(made[2]);
  // These gradients nobody asks for here.
  for (const auto unused : {slot::p_dalpha, slot::p_dbeta, slot::p_dmix}) {
    slots[unused].address = begin;
  }
  run(*launches, slots.data(), plan.device);
  return made;
}

variable_list AttendBackward::apply(variable_list&& gradients) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Tensor gradient = gradients[0];
  if (!gradient.defined()) {
    return variable_list(3);
  }
  const bool is_kept = at::GradMode::is_enabled();
  variable_list made;
  {
    at::AutoGradMode off(false);
    Call call;
    call.query = saved[0].unpack();
    call.key = saved[1].unpack();
    call.value = saved[2].unpack();
    call.alpha = saved[3].unpack();
    call.beta = saved[4].unpack();
    call.mask = saved[5].unpack();
    call.alpha_number = alpha_number;
    call.beta_number = beta_number;
    call.mix = mix;
    made = differentiate(*plan, call, gradient, saved[6].unpack(), saved[7].unpack());
  }
  if (!is_kept) {
    return made;
  }
  // Whoever differentiates the gradients again is told, and not given zeros.
  variable_list known;
  for (const auto& side : made) {
    known.push_back(side.detach().set_requires_grad(true));
  }
  auto refuse = make_node<torch::autograd::DelayedError, NodePointer>(NO_SECOND, 3);
  return (*refuse)(std::move(known));
}

// ---- Arguments from Python ----

// Exactly a float or an int, as a double.
bool read_number(PyObject* given, double& number) {
  if (PyFloat_CheckExact(given)) {
    number = PyFloat_AS_DOUBLE(given);
    return true;
  }
  if (!PyLong_CheckExact(given)) {
    return false;
  }
  number = PyLong_AsDouble(given);
  if (number == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return true;
}

// Which of some words it is; -1 = none of them.
int64_t read_word(PyObject* given, std::initializer_list<const char*> words) {
  if (!PyUnicode_CheckExact(given)) {
    return -1;
  }
  int64_t place = 0;
  for (const char* word : words) {
    if (PyUnicode_CompareWithASCIIString(given, word) == 0) {
      return place;
    }
    ++place;
  }
  return -1;
}

bool is_tensor(PyObject* given) {
  return Py_TYPE(given) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

// A tensor that no gradient is asked of, or None.
bool read_optional(PyObject* given, const at::Device& device, Tensor& side) {
  if (given == Py_None) {
    return true;
  }
  if (!is_tensor(given)) {
    return false;
  }
  side = THPVariable_Unpack(given);
  return !side.requires_grad() && is_plain(side, device) && !has_tangent(side);
}

// α or β: None, a positive number, or a tensor that does not learn.
bool read_temperature(PyObject* given, const at::Device& device, double& number, Tensor& side) {
  if (given == Py_None || is_tensor(given)) {
    return read_optional(given, device, side);
  }
  return read_number(given, number) && number > 0 && std::isfinite(number);
}

bool is_flag(PyObject* given) {
  return given == Py_True || given == Py_False;
}

// Whether values are checked at every call (`lln.checks.arguments`).
bool is_debugged() {
  const char* const given = std::getenv("LLN_DEBUG");
  return given != nullptr && std::strcmp(given, "1") == 0;
}

void add_temperature(Key& kind, PyObject* given, const Tensor& side) {
  if (side.defined()) {
    kind.look(side);
  } else {
    kind.add(given == Py_None ? -1 : -2);
  }
}

// False for calls that are not launched this way. What the kind does not hold is checked here:
// `learn` is called after all checks of the arguments, so the same kind passes them again.
bool read(PyObject* given, bool takes_groups, PyObject* given_impl, Call& call) {
  const auto& set = settings();
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(given));
  TORCH_CHECK(type == set.call_type, "a call of lln is expected");
  const auto& fields = set.fields;
  const auto get = [given](Py_ssize_t place) { return PyTuple_GET_ITEM(given, place); };
  if (set.launch == nullptr || PyList_GET_SIZE(set.observers) != 0 || !is_unwatched()) {
    return false;
  }
  for (const auto& [place, usual] : fields.others) {
    if (get(place) != usual) {
      return false;
    }
  }
  if (!is_tensor(get(fields.query)) || !is_tensor(get(fields.key)) || !is_tensor(get(fields.value))) {
    return false;
  }
  call.query = THPVariable_Unpack(get(fields.query));
  call.key = THPVariable_Unpack(get(fields.key));
  call.value = THPVariable_Unpack(get(fields.value));
  const auto device = call.query.device();
  if (device.type() != set.device) {
    return false;
  }
  for (const auto* side : {&call.query, &call.key, &call.value}) {
    if (!is_plain(*side, device) || side->dim() != 4 || has_tangent(*side)) {
      return false;
    }
  }
  if (at::autocast::is_autocast_enabled(device.type())) {
    // What autocast changes is changed in Python; what it leaves alone is a call like any other.
    const auto type = at::autocast::get_autocast_dtype(device.type());
    for (const auto* side : {&call.query, &call.key, &call.value}) {
      if (side->scalar_type() != type) {
        return false;
      }
    }
  }
  const auto kind_of_call = read_word(get(fields.kind), {"lln", "lln_diag"});
  const auto matching = read_word(get(fields.matching), {"variance", "entropy"});
  const auto impl = read_word(given_impl, {"auto", "triton"});
  double dropout = 1.0;
  if (kind_of_call < 0 || get(fields.bounds) != Py_None) {
    return false;
  }
  if (matching < 0 || impl < 0 || !read_number(get(fields.dropout_p), dropout) || dropout != 0.0 ||
      !is_flag(get(fields.is_causal)) ||
      !read_number(get(fields.mix), call.mix) || !(call.mix >= 0.0 && call.mix <= 1.0)) {
    return false;
  }
  if (call.query.size(1) != call.key.size(1) && !takes_groups) {
    return false;
  }
  if ((get(fields.alpha) == Py_None) != (get(fields.beta) == Py_None) ||
      !read_temperature(get(fields.alpha), device, call.alpha_number, call.alpha) ||
      !read_temperature(get(fields.beta), device, call.beta_number, call.beta) ||
      !read_optional(get(fields.key_mask), device, call.mask)) {
    return false;
  }
  if ((call.alpha.defined() || call.beta.defined()) && is_debugged()) {
    return false;
  }
  int64_t block_size = call.query.size(3);
  if (get(fields.block_size) != Py_None) {
    if (!PyLong_CheckExact(get(fields.block_size))) {
      return false;
    }
    block_size = PyLong_AsLongLong(get(fields.block_size));
    if (block_size == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
  }
  double scale = 0.0;
  if (get(fields.scale) != Py_None && !read_number(get(fields.scale), scale)) {
    return false;
  }
  call.tracked = at::GradMode::is_enabled() &&
      (call.query.requires_grad() || call.key.requires_grad() || call.value.requires_grad());
  int64_t bits = 0;
  std::memcpy(&bits, &scale, sizeof(bits));
  auto& kind = call.kind;
  kind.add(kind_of_call | (matching << 8) | (impl << 16) |
           (static_cast<int64_t>(call.tracked) << 24) |
           (static_cast<int64_t>(get(fields.is_causal) == Py_True) << 25) |
           (static_cast<int64_t>(get(fields.scale) == Py_None) << 26));
  kind.add(device.index());
  kind.add(block_size);
  kind.add(bits);
  kind.look(call.query);
  kind.look(call.key);
  kind.look(call.value);
  add_temperature(kind, get(fields.alpha), call.alpha);
  add_temperature(kind, get(fields.beta), call.beta);
  add_temperature(kind, get(fields.key_mask), call.mask);
  return true;
}

// ---- The module ----

// Runs `body`, and turns whatever it throws into a Python error.
template <class Body>
PyObject* guarded(Body&& body) {
  try {
    return body();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

// A call, whether groups of query heads are allowed, and how it is to run.
PyObject* attend(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK(count == 3, "attend takes 3 arguments, got ", count);
    if (plans().empty() || !is_flag(given[1])) {
      Py_RETURN_NONE;
    }
    Call call;
    if (!read(given[0], given[1] == Py_True, given[2], call)) {
      Py_RETURN_NONE;
    }
    const auto found = plans().find(call.kind);
    if (found == plans().end() || !is_free(call.query.device())) {
      Py_RETURN_NONE;
    }
    // A copy: another thread may forget the plan while this one launches.
    const PlanPointer plan = found->second;
    Tensor out;
    {
      const NoGil no_gil;
      out = forward(plan, call);
    }
    return THPVariable_Wrap(std::move(out));
  });
}

// The arguments of `attend`, then what the calls share.
PyObject* learn(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    TORCH_CHECK(count == 4, "learn takes 4 arguments, got ", count);
    Call call;
    if (!read(given[0], given[1] == Py_True, given[2], call)) {
      Py_RETURN_FALSE;
    }
    PyObject *repeat = nullptr, *matching = nullptr, *forward = nullptr;
    int keeps = 0;
    long long slots = 0;
    auto plan = std::make_shared<Plan>();
    if (!PyArg_ParseTuple(
            given[3], "OOOpL", &repeat, &matching, &forward, &keeps, &slots)) {
      return nullptr;
    }
    if (matching != Py_None) {
      plan->matching = launches_in(matching);
    }
    plan->forward = launches_in(forward);
    plan->device = call.query.device();
    plan->tracked = call.tracked;
    plan->keeps = keeps != 0;
    plan->slots = slots;
    plan->repeat = Py_NewRef(repeat);
    if (plans().size() >= MOST_KINDS) {
      plans().clear();
    }
    // A kind that is known keeps its plan, and the backward passes that this has learned.
    plans().emplace(call.kind, std::move(plan));
    Py_RETURN_TRUE;
  });
}

void drop_launches(PyObject* capsule) {
  delete static_cast<LaunchesPointer*>(PyCapsule_GetPointer(capsule, LAUNCHES));
}

// (bytes, offsets, steps) → a capsule; a step is (function, grid, threads, shared, follows,
// cells, fills), the cells in one bytes object, a fill (cell, slot, form).
PyObject* launches(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    long long bytes = 0;
    PyObject *offsets = nullptr, *steps = nullptr;
    if (!PyArg_ParseTuple(
            arguments, "LO!O!", &bytes, &PyTuple_Type, &offsets, &PyTuple_Type, &steps)) {
      return nullptr;
    }
    auto made = std::make_shared<Launches>();
    made->bytes = bytes;
    for (Py_ssize_t part = 0; part < PyTuple_GET_SIZE(offsets); ++part) {
      made->offsets.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(offsets, part)));
    }
    const auto last = slot::COUNT + made->offsets.size();
    TORCH_CHECK(last <= MOST_SLOTS, "at most ", MOST_SLOTS, " slots, got ", last);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(steps); ++index) {
      Step step;
      unsigned long long function = 0;
      const char* cells = nullptr;
      Py_ssize_t size = 0;
      PyObject* fills = nullptr;
      if (!PyArg_ParseTuple(
              PyTuple_GET_ITEM(steps, index), "K(III)IIIy#O!", &function, &step.grid[0],
              &step.grid[1], &step.grid[2], &step.threads, &step.shared, &step.follows, &cells,
              &size, &PyTuple_Type, &fills)) {
        return nullptr;
      }
      const auto cell_count = static_cast<size_t>(size) / sizeof(uint64_t);
      TORCH_CHECK(cell_count <= MOST_CELLS, "at most ", MOST_CELLS, " cells, got ", cell_count);
      step.function = reinterpret_cast<void*>(function);
      step.cells.resize(cell_count);
      std::memcpy(step.cells.data(), cells, cell_count * sizeof(uint64_t));
      for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(fills); ++place) {
        Fill fill;
        int form = 0;
        if (!PyArg_ParseTuple(
                PyTuple_GET_ITEM(fills, place), "IIC", &fill.cell, &fill.slot, &form)) {
          return nullptr;
        }
        fill.form = static_cast<Form>(form);
        TORCH_CHECK(
            fill.cell < cell_count && fill.slot < last &&
                (form == 'p' || form == 'f' || form == 'd'),
            "a fill of cell ", fill.cell, " from slot ", fill.slot, " is not possible");
        step.fills.push_back(fill);
      }
      // Triton launches nothing either where the grid is empty.
      if (step.grid[0] > 0 && step.grid[1] > 0 && step.grid[2] > 0) {
        made->steps.push_back(std::move(step));
      }
    }
    if (PyErr_Occurred()) {
      return nullptr;
    }
    auto* const held = new LaunchesPointer(std::move(made));
    PyObject* const capsule = PyCapsule_New(held, LAUNCHES, drop_launches);
    if (capsule == nullptr) {
      delete held;
    }
    return capsule;
  });
}

void keep(PyObject*& place, PyObject* given) {
  Py_XDECREF(place);
  place = Py_NewRef(given);
}

// Where the fields of calls stand; throws where one is missing.
Fields fields_of(PyObject* call_type) {
  const auto names =
      pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttrString(call_type, "_fields"));
  if (!names) {
    throw_from_python();
  }
  const auto place_of = [&](const char* wanted) {
    const auto count = PyTuple_Check(names.ptr()) ? PyTuple_GET_SIZE(names.ptr()) : 0;
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyObject* const name = PyTuple_GET_ITEM(names.ptr(), place);
      if (PyUnicode_CompareWithASCIIString(name, wanted) == 0) {
        return place;
      }
    }
    TORCH_CHECK(false, "calls have no field ", wanted);
  };
  Fields found;
  std::vector<bool> known(PyTuple_GET_SIZE(names.ptr()), false);
#define LLN_FIND(name)            \
  found.name = place_of(#name);   \
  known[found.name] = true;
  LLN_FIELDS(LLN_FIND)
#undef LLN_FIND
  const auto defaults = pybind11::reinterpret_steal<pybind11::object>(
      PyObject_GetAttrString(call_type, "_field_defaults"));
  if (!defaults) {
    throw_from_python();
  }
  for (Py_ssize_t place = 0; place < static_cast<Py_ssize_t>(known.size()); ++place) {
    if (!known[place]) {
      // Borrowed: the class of calls, which is kept, has it; no field can be equal to nullptr.
      PyObject* const usual =
          PyDict_GetItem(defaults.ptr(), PyTuple_GET_ITEM(names.ptr(), place));
      found.others.emplace_back(place, usual);
    }
  }
  return found;
}

// The kind of device, the addresses of the driver's functions, what Python may change, and the
// class of calls.
PyObject* configure(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    const char* device = nullptr;
    unsigned long long launch = 0, stream = 0, context = 0, number = 0, retain = 0, set = 0;
    PyObject *observers = nullptr, *overrides = nullptr, *runtime = nullptr, *long_way = nullptr;
    PyObject* call_type = nullptr;
    if (!PyArg_ParseTuple(
            arguments, "s(KKKKKK)O!O!OOO!", &device, &launch, &stream, &context, &number, &retain,
            &set, &PyList_Type, &observers, &PyDict_Type, &overrides, &runtime, &long_way,
            &PyType_Type, &call_type)) {
      return nullptr;
    }
    const auto fields = fields_of(call_type);
    auto& own = settings();
    plans().clear();
    own.device = at::Device(device).type();
    own.launch = reinterpret_cast<Launch>(launch);
    own.stream_of = reinterpret_cast<StreamOf>(stream);
    own.current_context = reinterpret_cast<CurrentContext>(context);
    own.device_of = reinterpret_cast<DeviceOf>(number);
    own.retain_context = reinterpret_cast<RetainContext>(retain);
    own.set_context = reinterpret_cast<SetContext>(set);
    keep(own.observers, observers);
    keep(own.overrides, overrides);
    keep(own.runtime, runtime);
    keep(own.long_way, long_way);
    keep(own.call_type, call_type);
    own.fields = fields;
    Py_RETURN_NONE;
  });
}

PyObject* forget(PyObject*, PyObject*) {
  plans().clear();
  Py_RETURN_NONE;
}

// Where the arguments of `launches` stand, by the names that the kernels give them; the memory of
// the launches follows them.
PyObject* slot_names(PyObject*, PyObject*) {
  PyObject* const names = PyTuple_New(slot::COUNT);
  for (size_t place = 0; names != nullptr && place < slot::COUNT; ++place) {
    PyTuple_SET_ITEM(names, place, PyUnicode_FromString(SLOT_NAMES[place]));
  }
  return names;
}

PyObject* known(PyObject*, PyObject*) {
  return PyLong_FromSize_t(plans().size());
}

PyMethodDef METHODS[] = {
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend)), METH_FASTCALL,
     "The output of a call like an earlier one, or None."},
    {"learn", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(learn)), METH_FASTCALL,
     "Keep the launches for calls like this one; False where it is unusual."},
    {"launches", launches, METH_VARARGS, "Launches in the form that learn takes."},
    {"configure", configure, METH_VARARGS, "Set the driver's functions, and forget all calls."},
    {"forget", forget, METH_NOARGS, "Forget all calls."},
    {"slot_names", slot_names, METH_NOARGS, "The arguments of kernels, in the order of the slots."},
    {"known", known, METH_NOARGS, "How many kinds of calls are kept."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    "lln_launcher",
    "Calls like an earlier one, from tensors to launches without Python.",
    -1,
    METHODS,
    nullptr,
    nullptr,
    nullptr,
    nullptr};

} // namespace

PyMODINIT_FUNC PyInit_lln_launcher() {
  return PyModule_Create(&MODULE);
}
