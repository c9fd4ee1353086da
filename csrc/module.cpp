// zoo._C as a Python module: setuptools names the library so. Loading it registers the operators (linear.cpp).

#include "choice.h"

#include <Python.h>

#include <cstring>
#include <stdexcept>

namespace {

int index_of(const char* name, const char* const* names, int count, const char* what) {
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(name, names[i]) == 0) return i;
  }
  PyErr_Format(PyExc_ValueError, "zoo._C: unknown %s '%s'", what, name);
  return -1;
}

const char* const kTypes[] = {"float64", "float32", "float16", "bfloat16"};
const char* const kActivations[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
const char* const kPrecisions[] = {"highest", "high", "medium"};

PyObject* choose(PyObject*, PyObject* args) {
  zoo::Query q{};
  long long batch, M, N, K, a_outer, a_k, b_outer, b_k;
  int a_aligned, b_aligned, capability, processors, hopper;
  const char *type, *activation, *precision, *forced;
  if (!PyArg_ParseTuple(
          args, "LLLLs(LLp)(LLp)ssiipz", &batch, &M, &N, &K, &type, &a_outer, &a_k, &a_aligned, &b_outer, &b_k, &b_aligned,
          &activation, &precision, &capability, &processors, &hopper, &forced)) {
    return nullptr;
  }
  const int which_type = index_of(type, kTypes, 4, "dtype"), which_precision = index_of(precision, kPrecisions, 3, "precision");
  q.activation = index_of(activation, kActivations, 5, "activation");
  if (which_type < 0 || which_precision < 0 || q.activation < 0) return nullptr;
  if (batch < 0 || M < 0 || N < 0 || K < 0 || processors < 1) {
    PyErr_SetString(PyExc_ValueError, "zoo._C.choose: sizes must not be negative, and processors at least 1");
    return nullptr;
  }
  q.batch = batch, q.M = M, q.N = N, q.K = K;
  q.type = static_cast<zoo::Type>(which_type);
  q.precision = static_cast<zoo::Precision>(which_precision);
  q.a = {a_outer, a_k, a_aligned != 0};
  q.b = {b_outer, b_k, b_aligned != 0};
  q.capability = capability, q.processors = processors, q.hopper = hopper != 0;
  zoo::Trace trace;
  zoo::Choice choice;
  try {
    choice = zoo::choose(q, forced, &trace);
  } catch (const std::runtime_error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  PyObject* rejected = PyTuple_New(static_cast<Py_ssize_t>(trace.rejected.size()));
  for (size_t i = 0; rejected && i < trace.rejected.size(); ++i) {
    PyObject* pair = Py_BuildValue("(ss)", zoo::name_of(trace.rejected[i].kernel), trace.rejected[i].reason.c_str());
    if (!pair || PyTuple_SetItem(rejected, static_cast<Py_ssize_t>(i), pair) != 0) Py_CLEAR(rejected);
  }
  if (!rejected) return nullptr;
  return Py_BuildValue(
      "(sssdN)", zoo::name_of(choice.kernel), trace.configuration.c_str(), trace.reason.c_str(), choice.microseconds,
      rejected);
}

PyObject* choose_together(PyObject*, PyObject* args) {
  long long M, N, K;
  int bias, capability, processors, hopper;
  const char *type, *activation, *precision, *forced;
  if (!PyArg_ParseTuple(
          args, "LLLsspsiipz", &M, &N, &K, &type, &activation, &bias, &precision, &capability, &processors, &hopper, &forced)) {
    return nullptr;
  }
  const int which_type = index_of(type, kTypes, 4, "dtype"), act = index_of(activation, kActivations, 5, "activation");
  const int which_precision = index_of(precision, kPrecisions, 3, "precision");
  if (which_type < 0 || act < 0 || which_precision < 0) return nullptr;
  if (M < 0 || N < 0 || K < 0 || processors < 1) {
    PyErr_SetString(PyExc_ValueError, "zoo._C.choose_together: sizes must not be negative, and processors at least 1");
    return nullptr;
  }
  zoo::Query dw{};
  dw.batch = 1, dw.M = N, dw.N = K, dw.K = M;
  dw.type = static_cast<zoo::Type>(which_type), dw.precision = static_cast<zoo::Precision>(which_precision);
  dw.capability = capability, dw.processors = processors, dw.hopper = hopper != 0;
  dw.a = {1, N, true}, dw.b = {1, K, true};
  zoo::Query dx = dw;
  dx.M = M, dx.N = K, dx.K = N;
  dx.a = {N, 1, true}, dx.b = {1, K, true};
  dw.a_in_planes = dx.a_in_planes = true;
  try {
    zoo::Query turned = dw;
    turned.M = K, turned.N = N, turned.a_in_planes = false, turned.b_in_planes = true;
    turned.a = {1, K, true}, turned.b = {1, N, true};
    const zoo::Choice dw_choice = zoo::choose(dw, forced, nullptr), turned_choice = zoo::choose(turned, forced, nullptr);
    const bool turn = dw.type == zoo::Type::f32 && N % 8 == 0 && zoo::turned_is_better(turned, turned_choice, dw_choice);
    const double apart = (turn ? turned_choice : dw_choice).microseconds + zoo::choose(dx, forced, nullptr).microseconds;
    const zoo::Together t = zoo::choose_together(dw, dx, act, bias != 0, apart, forced);
    return Py_BuildValue("(NNiid)", PyBool_FromLong(t.better), PyBool_FromLong(t.pass), t.dw_slices, t.dx_slices, t.microseconds);
  } catch (const std::runtime_error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* choose_through(PyObject*, PyObject* args) {
  long long M, N, K;
  int sums, capability, processors, hopper;
  const char *type, *activation, *forced;
  if (!PyArg_ParseTuple(
          args, "LLLsspiipz", &M, &N, &K, &type, &activation, &sums, &capability, &processors, &hopper, &forced)) {
    return nullptr;
  }
  zoo::Query q{};
  const int which_type = index_of(type, kTypes, 4, "dtype"), act = index_of(activation, kActivations, 5, "activation");
  if (which_type < 0 || act < 0) return nullptr;
  if (M < 0 || N < 0 || K < 0 || processors < 1) {
    PyErr_SetString(PyExc_ValueError, "zoo._C.choose_through: sizes must not be negative, and processors at least 1");
    return nullptr;
  }
  q.batch = 1, q.M = M, q.N = N, q.K = K;
  q.type = static_cast<zoo::Type>(which_type);
  q.a = {K, 1, true}, q.b = {1, N, true};
  q.capability = capability, q.processors = processors, q.hopper = hopper != 0;
  try {
    const zoo::ThroughChoice c = zoo::choose_through(q, act, sums != 0, forced);
    return Py_BuildValue("(Nid)", PyBool_FromLong(c.better), c.config, c.microseconds);
  } catch (const std::runtime_error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef methods[] = {
    {"choose", choose, METH_VARARGS, "Which CUDA kernel computes a product; see _C.pyi and csrc/choice.h."},
    {"choose_together", choose_together, METH_VARARGS, "Whether a backward pass is one launch; see _C.pyi."},
    {"choose_through", choose_through, METH_VARARGS, "Whether act' is in a product's epilogue; see _C.pyi."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C(void) {
  return PyModule_Create(&module);
}
