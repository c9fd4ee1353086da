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
  PyErr_Format(PyExc_ValueError, "zoo._C.choose: unknown %s '%s'", what, name);
  return -1;
}

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
  const char* const types[] = {"float64", "float32", "float16", "bfloat16"};
  const char* const activations[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  const char* const precisions[] = {"highest", "high", "medium"};
  const int which_type = index_of(type, types, 4, "dtype"), which_precision = index_of(precision, precisions, 3, "precision");
  q.activation = index_of(activation, activations, 5, "activation");
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

PyMethodDef methods[] = {
    {"choose", choose, METH_VARARGS, "Which CUDA kernel computes a product; see _C.pyi and csrc/choice.h."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C(void) {
  return PyModule_Create(&module);
}
