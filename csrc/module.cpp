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

struct BackwardQuery {
  zoo::Query dw{}, dx{};
  int activation, bias;
  const char* forced;
};

// A dense gradient's two products.
bool read_backward(PyObject* args, const char* name, BackwardQuery& q) {
  long long M, N, K;
  int capability, processors, hopper;
  const char *type, *activation, *precision;
  if (!PyArg_ParseTuple(
          args, "LLLsspsiipz", &M, &N, &K, &type, &activation, &q.bias, &precision, &capability, &processors, &hopper,
          &q.forced)) {
    return false;
  }
  const int which_type = index_of(type, kTypes, 4, "dtype"), which_precision = index_of(precision, kPrecisions, 3, "precision");
  q.activation = index_of(activation, kActivations, 5, "activation");
  if (which_type < 0 || q.activation < 0 || which_precision < 0) return false;
  if (M < 0 || N < 0 || K < 0 || processors < 1) {
    PyErr_Format(PyExc_ValueError, "zoo._C.%s: sizes must not be negative, and processors at least 1", name);
    return false;
  }
  q.dw.batch = 1, q.dw.M = N, q.dw.N = K, q.dw.K = M;
  q.dw.type = static_cast<zoo::Type>(which_type), q.dw.precision = static_cast<zoo::Precision>(which_precision);
  q.dw.capability = capability, q.dw.processors = processors, q.dw.hopper = hopper != 0;
  q.dw.a = {1, N, true}, q.dw.b = {1, K, true};
  q.dx = q.dw;
  q.dx.M = M, q.dx.N = K, q.dx.K = N;
  q.dx.a = {N, 1, true}, q.dx.b = {1, K, true};
  return true;
}

zoo::Apart apart_of(const BackwardQuery& q) {
  return zoo::choose_apart(&q.dw, &q.dx, q.activation, q.bias != 0, q.dw.M % 8 == 0, q.forced);
}

PyObject* choose_apart(PyObject*, PyObject* args) {
  BackwardQuery q;
  if (!read_backward(args, "choose_apart", q)) return nullptr;
  try {
    const zoo::Apart a = apart_of(q);
    return Py_BuildValue(
        "(NNNssd)", PyBool_FromLong(a.planes), PyBool_FromLong(a.raw_dx), PyBool_FromLong(a.turn), zoo::name_of(a.dx.kernel),
        zoo::name_of(a.dw.kernel), a.microseconds);
  } catch (const std::runtime_error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* choose_together(PyObject*, PyObject* args) {
  BackwardQuery q;
  if (!read_backward(args, "choose_together", q)) return nullptr;
  try {
    const zoo::Together t = zoo::choose_together(q.dw, q.dx, q.activation, apart_of(q).microseconds, q.forced);
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
    {"choose_apart", choose_apart, METH_VARARGS, "How a backward pass is done by products of their own; see _C.pyi."},
    {"choose_together", choose_together, METH_VARARGS, "Whether a backward pass is one launch; see _C.pyi."},
    {"choose_through", choose_through, METH_VARARGS, "Whether act' is in a product's epilogue; see _C.pyi."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C(void) {
  return PyModule_Create(&module);
}
