// zoo._C_eager: linear and mlp as eager mode calls them, with their autograd in C++. In Python the calculus of a layer costs
// more host time than the kernels of a small one (zoo/ops/_routing.py has it, for every mode).
//
// This library alone is bound to the torch and the Python that it was built with: the stable ABI has no autograd. It is
// optional. What it does not take, it leaves to Python by returning NotImplemented: tensor subclasses, modes, torch.func,
// traces, forward mode, other devices, and casts that are not of a layer's float32 parameters.

#include "eager_kernels.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <vector>

namespace zoo {  // not an anonymous one: a graph's nodes are named after these classes
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Maybe = std::optional<Tensor>;
using Text = std::string_view;

// zoo's operators

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

#define ZOO_OPERATOR(name, ...)                                    \
  const auto& name() {                                             \
    static const auto op = find<__VA_ARGS__>("zoo::" #name);       \
    return op;                                                     \
  }

ZOO_OPERATOR(linear, Tensor(const Tensor&, const Tensor&, const Maybe&))
ZOO_OPERATOR(linear_activation, std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Maybe&, Text, bool))
ZOO_OPERATOR(linear_cast, std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Maybe&, Text, bool))
ZOO_OPERATOR(
    linear_backward, std::tuple<Tensor, Tensor, Tensor>(
                         const Tensor&, const Maybe&, const Maybe&, const Maybe&, Text, bool, bool, bool, bool))
ZOO_OPERATOR(
    mlp, std::tuple<Tensor, Tensor, Tensor>(
             const Tensor&, const Tensor&, const Maybe&, const Tensor&, const Maybe&, Text, bool))
ZOO_OPERATOR(
    mlp_cast, std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
                  const Tensor&, const Tensor&, const Maybe&, const Tensor&, const Maybe&, Text, bool))
ZOO_OPERATOR(
    mlp_backward, std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
                      const Tensor&, const Maybe&, const Maybe&, const Maybe&, const Maybe&, const Maybe&, Text, bool,
                      bool, bool, bool, bool, bool))
ZOO_OPERATOR(activation_grad, Tensor(const Tensor&, const Tensor&, Text))
ZOO_OPERATOR(linear_input_grad, Tensor(const Tensor&, const Tensor&))
ZOO_OPERATOR(linear_weight_grad, Tensor(const Tensor&, const Tensor&))
ZOO_OPERATOR(linear_bias_grad, Tensor(const Tensor&))

bool within(c10::DispatchKeySet keys, c10::DispatchKeySet usual) {
  return (keys.raw_repr() & ~usual.raw_repr()) == 0;
}

// No mode, transform or trace is active: what a tensor's own keys tell is all there is to do.
bool nothing_intervenes() {
  constexpr auto usual = c10::DispatchKeySet({c10::DispatchKey::BackendSelect, c10::DispatchKey::ADInplaceOrView});
  return within(c10::impl::tls_local_dispatch_key_set().included_, usual) && !at::impl::torch_function_mode_enabled();
}

// A dense tensor in the memory of a CPU or of CUDA that nothing wraps.
bool is_plain(const Tensor& t) {
  constexpr auto usual = c10::DispatchKeySet(
      {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU,
       c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
  return within(t.key_set(), usual) && !t.is_conj() && !t.is_neg() && !t._fw_grad(0).defined();
}

// Below autograd, where no derivative is taken of what is called.
struct Below {
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
  explicit Below(bool below = true) {
    if (below) guard.emplace();
  }
};

// Whether a gradient is no more than a number: no derivative of it is recorded, and nothing maps or transforms it.
bool is_final(const Tensor& grad) {
  return !at::GradMode::is_enabled() && nothing_intervenes() && is_plain(grad);
}

constexpr std::array<Text, 5> kActivations{"none", "relu", "gelu", "gelu_tanh", "silu"};

bool from_product(int64_t activation) {
  return activation > 1;
}

Maybe maybe(const Tensor& t) {
  return t.defined() ? Maybe(t) : std::nullopt;
}

// `kept` of a call's tensors
const Tensor& where(bool kept, const Tensor& t) {
  static const Tensor none;
  return kept ? t : none;
}

Tensor sum(const Tensor& a, const Tensor& b) {
  return !a.defined() ? b : !b.defined() ? a : a + b;
}

// Which of the tensors that a Function was given want a gradient; one that was not there does not.
template <size_t count>
std::array<bool, count> needs(AutogradContext* ctx, const std::array<bool, count>& there) {
  std::array<bool, count> found{};
  size_t edge = 0;
  for (size_t i = 0; i < count; ++i) {
    if (there[i]) found[i] = ctx->needs_input_grad(edge++);
  }
  return found;
}

// What backward has to know and no tensor tells: the activation, whether parameters were cast, which biases there were.
struct Facts {
  int64_t activation;
  bool wide, bias1, bias2;

  void put(AutogradContext* ctx) const {
    ctx->saved_data["facts"] = activation << 3 | int64_t{wide} << 2 | int64_t{bias1} << 1 | int64_t{bias2};
    ctx->set_materialize_grads(false);
  }
  static Facts of(AutogradContext* ctx) {
    const int64_t bits = ctx->saved_data["facts"].toInt();
    return {bits >> 3, (bits >> 2 & 1) != 0, (bits >> 1 & 1) != 0, (bits & 1) != 0};
  }
};

// A parameter that was cast, for a second derivative. Not a saved variable: as with torch's own layers under autocast, it may
// change before a first derivative is taken, and a hook on what is saved gets what was multiplied alone.
void remember(AutogradContext* ctx, const char* name, const Tensor& parameter) {
  if (!parameter.requires_grad()) return;
  ctx->saved_data[name] = c10::ivalue::Tuple::create(parameter, static_cast<int64_t>(parameter._version()));
}

// A weight as it was multiplied, connected to the parameter it was cast from where a second derivative is taken.
Tensor connected(AutogradContext* ctx, const char* name, const Tensor& lowered) {
  if (!lowered.defined() || !at::GradMode::is_enabled()) return lowered;
  const auto found = ctx->saved_data.find(name);
  if (found == ctx->saved_data.end()) return lowered;
  const auto& kept = found->second.toTupleRef().elements();
  const Tensor& parameter = kept[0].toTensor();
  if (static_cast<int64_t>(parameter._version()) != kept[1].toInt()) {
    throw std::runtime_error(
        "zoo: a parameter was changed in place after a forward pass under autocast; a second derivative needs it as it was: "
        "take it before the change");
  }
  return parameter.to(lowered.scalar_type());
}

Tensor through_activation(const Tensor& grad, const Tensor& saved, int64_t activation) {
  return activation == 0 || !grad.defined() ? grad : activation_grad().call(grad, saved, kActivations[activation]);
}

Tensor asked(bool need, const Tensor& gradient) {
  return need ? gradient : Tensor();
}

Tensor widened(bool wide, const Tensor& gradient) {
  return wide && gradient.defined() ? gradient.to(at::kFloat) : gradient;
}

// How a Function is called, and where it leaves its first output for recorded()
struct How {
  bool wide;
  Tensor* output;
};

}  // namespace

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  // y, and the product before the activation: an output too, it carries what a second derivative sends back
  static variable_list forward(
      AutogradContext* ctx, const Tensor& input, const Tensor& weight, const Maybe& bias, int64_t activation, How how) {
    const bool x_wants = input.requires_grad(), w_wants = weight.requires_grad(), wide = how.wide;
    const Text name = kActivations[activation];
    Below below;
    variable_list made;
    Tensor lowered = weight;
    if (wide) {
      auto [y, z, low] = linear_cast().call(input, weight, bias, name, from_product(activation));
      made = {std::move(y), std::move(z)};
      lowered = std::move(low);
    } else if (activation == 0) {
      made = {linear().call(input, weight, bias)};
    } else {
      auto [y, z] = linear_activation().call(input, weight, bias, name, from_product(activation));
      made = {std::move(y), std::move(z)};
    }
    if (activation == 0) made.resize(1);
    Facts{activation, wide, bias.has_value(), false}.put(ctx);
    ctx->save_for_backward(
        {where(w_wants, input), where(x_wants, lowered),
         activation == 0 ? Tensor() : made[from_product(activation) ? 1 : 0]});
    if (wide && x_wants) remember(ctx, "weight", weight);
    *how.output = made[0];
    return made;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Facts facts = Facts::of(ctx);
    const auto [x_needs, w_needs, b_needs] = needs<3>(ctx, {true, true, facts.bias1});
    const auto kept = ctx->get_saved_variables();
    const Tensor &input = kept[0], &saved = kept[2];
    const Tensor weight = connected(ctx, "weight", kept[1]);
    const Tensor& grad = grads[0];
    const Tensor product_grad = grads.size() > 1 && from_product(facts.activation) ? grads[1] : Tensor();
    const Text name = kActivations[facts.activation];
    if (!product_grad.defined() && !grad.defined()) return variable_list(5);
    // one operator; a derivative of it is taken by zoo/ops/_linear.py. torch.func's transforms know those that it is made of
    if (!product_grad.defined() && nothing_intervenes()) {
      const Below below(is_final(grad));
      auto [dx, dw, db] = linear_backward().call(
          grad, maybe(saved), maybe(input), maybe(weight), name, x_needs, w_needs, b_needs, facts.wide);
      return {asked(x_needs, dx), asked(w_needs, dw), asked(b_needs, db), {}, {}};
    }
    const Tensor total = sum(through_activation(grad, saved, facts.activation), product_grad);
    return {x_needs ? linear_input_grad().call(total, weight) : Tensor(),
            w_needs ? widened(facts.wide, linear_weight_grad().call(total, input)) : Tensor(),
            b_needs ? widened(facts.wide, linear_bias_grad().call(total)) : Tensor(),
            {},
            {}};
  }
};

struct MlpFunction : torch::autograd::Function<MlpFunction> {
  // y, the hidden layer and the product before it
  static variable_list forward(
      AutogradContext* ctx, const Tensor& input, const Tensor& weight1, const Maybe& bias1, const Tensor& weight2,
      const Maybe& bias2, int64_t activation, How how) {
    const bool x_wants = input.requires_grad(), w1_wants = weight1.requires_grad(), w2_wants = weight2.requires_grad();
    const bool first = x_wants || w1_wants || (bias1 && bias1->requires_grad()), by_product = from_product(activation);
    const bool wide = how.wide;
    const Text name = kActivations[activation];
    Below below;
    Tensor y, hidden, product, low1 = weight1, low2 = weight2;
    if (wide) std::tie(y, hidden, product, low1, low2) = mlp_cast().call(input, weight1, bias1, weight2, bias2, name, true);
    else std::tie(y, hidden, product) = mlp().call(input, weight1, bias1, weight2, bias2, name, true);
    Facts{activation, wide, bias1.has_value(), bias2.has_value()}.put(ctx);
    ctx->save_for_backward(
        {where(w1_wants, input), where(x_wants, low1), where(first, low2),
         where(w2_wants || (first && !by_product), hidden), where(first && by_product, product)});
    if (wide && x_wants) remember(ctx, "weight1", weight1);
    if (wide && first) remember(ctx, "weight2", weight2);
    *how.output = y;
    return {y, hidden, product};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Facts facts = Facts::of(ctx);
    const auto [x_needs, w1_needs, b1_needs, w2_needs, b2_needs] =
        needs<5>(ctx, {true, true, facts.bias1, true, facts.bias2});
    const auto kept = ctx->get_saved_variables();
    const Tensor &input = kept[0], &hidden = kept[3], &product = kept[4];
    const Tensor weight1 = connected(ctx, "weight1", kept[1]), weight2 = connected(ctx, "weight2", kept[2]);
    const Tensor& saved = product.defined() ? product : hidden;
    const Tensor &grad = grads[0], &hidden_grad = grads[1];
    const Tensor product_grad = from_product(facts.activation) ? grads[2] : Tensor();
    const Text name = kActivations[facts.activation];
    variable_list made(7);
    const bool ordinary = !hidden_grad.defined() && !product_grad.defined();
    if (ordinary && !grad.defined()) return made;
    if (ordinary && nothing_intervenes()) {
      const Below below(is_final(grad));
      auto [dx, dw1, db1, dw2, db2] = mlp_backward().call(
          grad, maybe(hidden), maybe(saved), maybe(input), maybe(weight1), maybe(weight2), name, x_needs, w1_needs,
          b1_needs, w2_needs, b2_needs, facts.wide);
      made[0] = asked(x_needs, dx), made[1] = asked(w1_needs, dw1), made[2] = asked(b1_needs, db1);
      made[3] = asked(w2_needs, dw2), made[4] = asked(b2_needs, db2);
      return made;
    }
    Tensor first;
    if (x_needs || w1_needs || b1_needs) {
      const Tensor through = sum(grad.defined() ? linear_input_grad().call(grad, weight2) : Tensor(), hidden_grad);
      first = sum(through_activation(through, saved, facts.activation), product_grad);
    }
    if (first.defined()) {
      if (x_needs) made[0] = linear_input_grad().call(first, weight1);
      if (w1_needs) made[1] = widened(facts.wide, linear_weight_grad().call(first, input));
      if (b1_needs) made[2] = widened(facts.wide, linear_bias_grad().call(first));
    }
    if (grad.defined()) {
      if (w2_needs) made[3] = widened(facts.wide, linear_weight_grad().call(grad, hidden));
      if (b2_needs) made[4] = widened(facts.wide, linear_bias_grad().call(grad));
    }
    return made;
  }
};

namespace {

// The arguments as Python gave them

constexpr size_t kMost = 5;

// The tensors of a call and how it is to be computed.
struct Call {
  std::array<Tensor, kMost> tensors;  // the input, then the parameters; a bias that is None is undefined
  int64_t activation = 0;
  bool differentiates = false;
  bool wide = false;  // the parameters are float32 and are cast to the input's dtype
  std::optional<at::ScalarType> cast;  // of the input, first; it is recorded, where a gradient is asked for
};

int64_t activation_of(PyObject* name) {
  if (name == Py_None) return 0;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &size) : nullptr;
  if (!text) {
    PyErr_Clear();
    return -1;
  }
  for (size_t i = 1; i < kActivations.size(); ++i) {
    if (kActivations[i] == Text(text, static_cast<size_t>(size))) return static_cast<int64_t>(i);
  }
  return -1;
}

// Whether the call is one for this library; what it needs to know of it.
bool read(PyObject* const* args, size_t count, Call& call) {
  call.activation = activation_of(args[count]);
  if (call.activation < (count > 3) || !nothing_intervenes()) return false;  // an mlp has one
  for (size_t i = 0; i < count; ++i) {
    if (args[i] == Py_None && (i == 2 || i == 4)) continue;
    if (!THPVariable_CheckExact(args[i])) return false;
    call.tensors[i] = THPVariable_Unpack(args[i]);
    if (!is_plain(call.tensors[i])) return false;
    call.differentiates = call.differentiates || call.tensors[i].requires_grad();
  }
  call.differentiates = call.differentiates && at::GradMode::is_enabled();
  const auto device = call.tensors[0].device().type();
  if (!at::autocast::is_autocast_enabled(device)) return true;
  // under autocast: parameters are all of its dtype, or all float32 and not themselves computed
  const auto dtype = at::autocast::get_autocast_dtype(device);
  const auto type = call.tensors[1].scalar_type();
  if ((dtype != at::kHalf && dtype != at::kBFloat16) || (type != dtype && type != at::kFloat)) return false;
  for (size_t i = 1; i < count; ++i) {
    const Tensor& t = call.tensors[i];
    if (t.defined() && (t.scalar_type() != type || (type != dtype && !t.is_leaf()))) return false;
  }
  call.wide = type != dtype;
  const Tensor& input = call.tensors[0];
  if (input.scalar_type() == dtype) return true;
  if (!input.is_floating_point() || input.scalar_type() == at::kDouble) return false;
  call.cast = dtype;
  return true;
}

// Where no gradient is asked for, the parameters as autocast has them: cast once for as long as it lasts. Not below
// autograd: the cache keeps what it casts connected to the parameter, for a layer of torch that wants a gradient.
std::array<Tensor, kMost> lowered(const Call& call) {
  std::array<Tensor, kMost> made = call.tensors;
  if (!call.wide) return made;
  const auto dtype = made[0].scalar_type();
  for (size_t i = 1; i < kMost; ++i) {
    if (!made[i].defined()) continue;
    const Tensor cast = at::autocast::cached_cast(dtype, made[i], made[0].device().type());
    made[i] = cast.scalar_type() == dtype ? cast : made[i].to(dtype);  // an autocast around this one has its own dtype
  }
  return made;
}

// A Function's output. A hook that raises while tensors are saved, as checkpoint's does to stop a recomputation, would
// leave the node and the outputs that it was to save holding each other for ever.
template <typename Function, typename... Tensors>
Tensor recorded(const Call& call, const Tensors&... tensors) {
  Tensor output;
  try {
    return Function::apply(tensors..., call.activation, How{call.wide, &output})[0];
  } catch (...) {
    const auto grad_fn = output.defined() ? output.grad_fn() : nullptr;
    if (auto* node = dynamic_cast<torch::autograd::CppNode<Function>*>(grad_fn.get())) node->ctx_.save_for_backward({});
    throw;
  }
}

Tensor run_linear(const Call& call) {
  if (call.differentiates) {
    const auto& [input, weight, bias, _, __] = call.tensors;
    return recorded<LinearFunction>(call, input, weight, maybe(bias));
  }
  const auto [input, weight, bias, _, __] = lowered(call);
  const Below below;
  if (call.activation == 0) return linear().call(input, weight, maybe(bias));
  return std::get<0>(linear_activation().call(input, weight, maybe(bias), kActivations[call.activation], false));
}

Tensor run_mlp(const Call& call) {
  if (call.differentiates) {
    const auto& [input, weight1, bias1, weight2, bias2] = call.tensors;
    return recorded<MlpFunction>(call, input, weight1, maybe(bias1), weight2, maybe(bias2));
  }
  const auto [input, weight1, bias1, weight2, bias2] = lowered(call);
  const Below below;
  const Text name = kActivations[call.activation];
  return std::get<0>(mlp().call(input, weight1, maybe(bias1), weight2, maybe(bias2), name, false));
}

template <size_t count, Tensor (*run)(const Call&)>
PyObject* entry(PyObject*, PyObject* const* args, Py_ssize_t given) {
  HANDLE_TH_ERRORS
  Call call;
  if (given != static_cast<Py_ssize_t>(count + 1) || !read(args, count, call)) Py_RETURN_NOTIMPLEMENTED;
  Tensor y;
  {
    pybind11::gil_scoped_release released;
    if (call.cast) call.tensors[0] = call.tensors[0].to(*call.cast);
    y = run(call);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

template <size_t count, Tensor (*run)(const Call&)>
PyCFunction function() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&entry<count, run>));
}

PyMethodDef methods[] = {
    {"linear", function<3, run_linear>(), METH_FASTCALL, "linear(input, weight, bias, activation); see _C_eager.pyi."},
    {"mlp", function<5, run_mlp>(), METH_FASTCALL, "mlp(input, weight1, bias1, weight2, bias2, activation); see _C_eager.pyi."},
    {"implement", implement, METH_VARARGS, "implement(name, function); see _C_eager.pyi."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_eager", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace zoo

PyMODINIT_FUNC PyInit__C_eager() {
  return PyModule_Create(&zoo::module);
}
