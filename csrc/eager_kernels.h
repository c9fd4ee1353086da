#pragma once

#include <Python.h>

namespace zoo {

// implement(name, function): `function` takes the derivatives of the operator, as its Autograd key's kernel.
PyObject* implement(PyObject* module, PyObject* args);

}  // namespace zoo
