// The kernels of the operators' Autograd key, for zoo._C_eager. A derivative is Python's to take (zoo/ops/_routing.py); but a
// compiled graph calls every operator through this key, and where none is asked for, Python is not asked either.

#include "eager_kernels.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <stdexcept>
#include <string>

namespace zoo {
namespace {

bool asks(const c10::IValue& argument) {
  if (!argument.isTensor()) return false;
  const at::Tensor& t = argument.toTensor();
  return t.defined() && ((at::GradMode::is_enabled() && t.requires_grad()) || t._fw_grad(0).defined());
}

struct Kernel : c10::OperatorKernel {
  PyObject* function;  // never released: operators outlive Python
  explicit Kernel(PyObject* f) : function(Py_NewRef(f)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    bool any = false;
    for (const c10::IValue& argument : torch::jit::last(*stack, count)) any = any || asks(argument);
    if (!any) {
      const at::AutoDispatchBelowAutograd below;
      op.callBoxed(stack);
      return;
    }
    const pybind11::gil_scoped_acquire held;
    pybind11::tuple arguments(count);
    for (size_t i = 0; i < count; ++i) arguments[i] = torch::jit::toPyObject(std::move(torch::jit::peek(*stack, i, count)));
    torch::jit::drop(*stack, count);
    const auto made = pybind11::reinterpret_steal<pybind11::object>(PyObject_CallObject(function, arguments.ptr()));
    if (!made) throw pybind11::error_already_set();  // python_error tells TorchScript nothing
    const auto& returns = op.schema().returns();
    if (returns.size() == 1) {
      stack->push_back(torch::jit::toIValue(made, returns[0].type()));
      return;
    }
    const auto all = pybind11::reinterpret_borrow<pybind11::sequence>(made);
    for (size_t i = 0; i < returns.size(); ++i) stack->push_back(torch::jit::toIValue(all[i], returns[i].type()));
  }
};

}  // namespace

PyObject* implement(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* name = nullptr;
  PyObject* function = nullptr;
  if (!PyArg_ParseTuple(args, "sO:implement", &name, &function)) return nullptr;
  static auto* library = new torch::Library(torch::Library::IMPL, "zoo", c10::DispatchKey::Autograd, __FILE__, __LINE__);
  library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(function)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace zoo
