#include "products.h"

#include "sm90/sm90.h"

#ifndef ZOO_WITHOUT_PYTHON
#include <Python.h>
#endif

#include <atomic>
#include <cstdlib>
#include <string>

namespace zoo::cuda {
namespace {

// torch.get_float32_matmul_precision(). The stable ABI has no door to it, so Python is asked, where there is one: a program
// in C++ alone gets float32's full accuracy.
Precision float32_precision() {
#ifdef ZOO_WITHOUT_PYTHON
  return Precision::highest;
#else
  if (!Py_IsInitialized()) return Precision::highest;
  const PyGILState_STATE state = PyGILState_Ensure();
  // Not a static initialiser: another thread that waits for it with the GIL in hand would wait for ever.
  static std::atomic<PyObject*> known{nullptr};
  PyObject* ask = known.load();
  if (!ask) {
    PyObject* module = PyImport_ImportModule("torch");
    ask = module ? PyObject_GetAttrString(module, "get_float32_matmul_precision") : nullptr;
    Py_XDECREF(module);
    known.store(ask);
  }
  Precision precision = Precision::highest;
  if (PyObject* name = ask ? PyObject_CallObject(ask, nullptr) : nullptr) {
    if (PyUnicode_CompareWithASCIIString(name, "high") == 0) precision = Precision::high;
    if (PyUnicode_CompareWithASCIIString(name, "medium") == 0) precision = Precision::medium;
    Py_DECREF(name);
  }
  PyErr_Clear();
  PyGILState_Release(state);
  return precision;
#endif
}

int64_t element_bytes(Type type) {
  return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2;
}

// A copy of an operand with K along memory, rows a multiple of 16 bytes apart.
struct Packed {
  Tensor memory;
  Layout layout;
};
Packed packed(const Layout& x, const void* data, int64_t rows, int64_t K, Type type, const Tensor& like, void* stream) {
  const int64_t size = element_bytes(type), ld = (K * size + 15) / 16 * 16 / size;
  Packed p{bytes(like, rows * ld * size), {ld, 1, true}};
  sm90::pack({data, 0, x.outer, x.k}, rows, K, p.memory.mutable_data_ptr(), ld, static_cast<int>(size), stream);
  return p;
}

sm90::Operand operand(const Layout& x, const void* data) {
  sm90::Operand o{};
  o.data = data;
  o.mn = x.mn_major();
  o.ld = o.mn ? x.k : x.outer;
  return o;
}

struct Side {
  Layout layout;
  const void* data;
  int64_t rows;
};

int64_t plane_bytes(const sm90::Planes& p) {
  return 2 * p.count * p.plane;
}

// What `split` writes of one operand.
sm90::Planes planes(const Side& side, int64_t K, int32_t count) {
  const bool mn = side.layout.mn_major();
  const int64_t rows = mn ? K : side.rows, cols = mn ? side.rows : K;
  sm90::Planes p{};
  p.x = static_cast<const float*>(side.data);
  p.ld = mn ? side.layout.k : side.layout.outer;
  p.rows = static_cast<int32_t>(rows);
  p.cols = static_cast<int32_t>(cols);
  p.count = count;
  p.planes_ld = (cols + 7) / 8 * 8;
  p.plane = rows * p.planes_ld;
  return p;
}

sm90::Operand operand(const Side& side, const sm90::Planes& p) {
  sm90::Operand o{};
  o.data = p.planes;
  o.ld = p.planes_ld;
  o.plane = p.plane;
  o.mn = side.layout.mn_major();
  o.source = p.x;
  o.source_row = side.layout.outer;
  o.source_k = side.layout.k;
  o.flags = p.flags;
  o.flag_count = sm90::split_blocks(p.rows, p.cols);
  return o;
}

// float32 that the kernel splits itself.
sm90::Operand raw_operand(const Side& side) {
  sm90::Operand o = operand(side.layout, side.data);
  o.source = static_cast<const float*>(side.data);
  o.source_row = side.layout.outer;
  o.source_k = side.layout.k;
  return o;
}

// A product by tiles, with what it needs on its way. Planes of `a` that are there already are taken as they are; those of `b`
// as well, and then y is (N, M).
void run_tiles(
    const Product& p, Type type, const Choice& c, const Query& q, const Tensor& like, const Launch& launch,
    const sm90::Operand* a_planes = nullptr, const sm90::Operand* b_planes = nullptr) {
  Side a{q.a, p.a.data, p.M}, b{q.b, p.b.data, p.N};
  std::optional<Packed> a_copy, b_copy;
  if (c.pack_a && !a_planes) {
    a_copy = packed(a.layout, a.data, p.M, p.K, type, like, launch.stream);
    a = {a_copy->layout, a_copy->memory.const_data_ptr(), p.M};
  }
  if (c.pack_b) {
    b_copy = packed(b.layout, b.data, p.N, p.K, type, like, launch.stream);
    b = {b_copy->layout, b_copy->memory.const_data_ptr(), p.N};
  }
  sm90::Problem problem{};
  problem.M = static_cast<int32_t>(p.M);
  problem.N = static_cast<int32_t>(p.N);
  problem.K = static_cast<int32_t>(p.K);
  problem.type = type;
  problem.planes = c.kernel == Kernel::split6 ? 3 : c.kernel == Kernel::split3 ? 2 : 1;
  problem.raw_a = c.raw_a;
  problem.bias = p.bias;
  problem.y = p.y;
  problem.z = p.z;
  problem.turned = b_planes != nullptr;
  problem.ld = problem.turned ? p.M : p.N;
  problem.act = p.act;
  problem.config = c.config;
  problem.spread = c.spread;
  problem.processors = q.processors;
  std::optional<Tensor> memory, workspace;
  if (problem.planes == 1) {
    problem.a = operand(a.layout, a.data);
    problem.b = operand(b.layout, b.data);
  } else {
    sm90::Planes jobs[2];
    Side* sides[2];
    int count = 0;
    if (!b_planes) sides[count++] = &b;
    if (!a_planes && !c.raw_a) sides[count++] = &a;
    int64_t size = 0, flags = 0;
    for (int i = 0; i < count; ++i) {
      jobs[i] = planes(*sides[i], p.K, problem.planes);
      size += plane_bytes(jobs[i]);
      flags += sm90::split_blocks(jobs[i].rows, jobs[i].cols);
    }
    if (count > 0) memory = bytes(like, size + 4 * flags);
    char* at = count > 0 ? static_cast<char*>(memory->mutable_data_ptr()) : nullptr;
    int32_t* flag = reinterpret_cast<int32_t*>(at + size);
    for (int i = 0; i < count; ++i) {
      jobs[i].planes = at;
      jobs[i].flags = flag;
      at += plane_bytes(jobs[i]);
      flag += sm90::split_blocks(jobs[i].rows, jobs[i].cols);
    }
    if (count > 0) sm90::split(jobs[0], count > 1 ? jobs[1] : sm90::Planes{}, launch.stream);
    problem.a = a_planes ? *a_planes : c.raw_a ? raw_operand(a) : operand(a, jobs[1]);
    problem.b = b_planes ? *b_planes : operand(b, jobs[0]);
  }
  if (c.spread) {
    problem.workspace_bytes = sm90::arrival_bytes() + int64_t{2} * q.processors * c.tile * 4;
    workspace = bytes(like, problem.workspace_bytes);
    problem.workspace = workspace->mutable_data_ptr();
    zero(problem.workspace, sm90::arrival_bytes(), launch.stream);
  }
  sm90::product(problem, launch.stream);
}

void run_mma(
    const Product& product, Type type, const Choice& c, const Query& q, const Tensor& like, const Launch& launch) {
  Product p = product;
  std::optional<Packed> a_copy, b_copy;
  if (c.pack_a) {
    a_copy = packed(q.a, p.a.data, p.M, p.K, type, like, launch.stream);
    p.a = {a_copy->memory.const_data_ptr(), 0, a_copy->layout.outer, 1};
  }
  if (c.pack_b) {
    b_copy = packed(q.b, p.b.data, p.N, p.K, type, like, launch.stream);
    p.b = {b_copy->memory.const_data_ptr(), 0, 1, b_copy->layout.outer};
  }
  mma_product(p, type, launch.stream);
}

}  // namespace

Query query_of(const Product& p, Type type, const Launch& launch) {
  const Chip chip = chip_of(launch.device);
  Query q{};
  q.batch = p.batch;
  q.M = p.M;
  q.N = p.N;
  q.K = p.K;
  q.type = type;
  q.a = {p.a.row_stride, p.a.col_stride, aligned(p.a.data)};
  q.b = {p.b.col_stride, p.b.row_stride, aligned(p.b.data)};
  q.activation = static_cast<int>(p.act);
  q.capability = chip.capability;
  q.processors = chip.processors;
  q.precision = Precision::highest;
#ifdef ZOO_SM90A
  q.hopper = true;
#endif
  if (type == Type::f32) q.precision = float32_precision();
  return q;
}

namespace {

Choice choice_of(const Query& q) {
  return choose(q, std::getenv("ZOO_LINEAR_KERNEL"), nullptr);
}

sm90::SmallProblem small_problem(const Product& p, Type type, int slices) {
  sm90::SmallProblem s{};
  s.M = static_cast<int32_t>(p.M);
  s.N = static_cast<int32_t>(p.N);
  s.K = static_cast<int32_t>(p.K);
  s.type = type;
  s.a = p.a;
  s.b = p.b;
  s.bias = p.bias;
  s.y = p.y;
  s.z = p.z;
  s.ld = p.N;
  s.act = p.act;
  s.slices = slices;
  return s;
}

bool allows_gemv(const char* forced) {
  return !forced || !*forced || std::string(forced) == "gemv";
}

}  // namespace

Act act_of(const std::string& name) {
  switch (parse_activation(name)) {
    case Activation::relu: return Act::relu;
    case Activation::gelu: return Act::gelu;
    case Activation::gelu_tanh: return Act::gelu_tanh;
    case Activation::silu: return Act::silu;
    case Activation::none: break;
  }
  return Act::none;
}

bool aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

Tensor bytes(const Tensor& like, int64_t count) {
  return empty(like, Sizes{count}, aoti_torch_dtype_uint8());
}

Type type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Double: return Type::f64;
    case ScalarType::Half: return Type::f16;
    case ScalarType::BFloat16: return Type::bf16;
    default: return Type::f32;
  }
}

void run_product(const Product& p, const Tensor& like, const Launch& launch) {
  const Type type = type_of(like);
  const Query q = query_of(p, type, launch);
  const Choice c = choice_of(q);
  switch (c.kernel) {
    case Kernel::tiled: return tiled_product(p, type, launch.stream);
    case Kernel::gemv: return gemv(p, type, launch.stream);
    case Kernel::cublas:
      return cublas_product(p, type == Type::f32 && q.precision == Precision::highest, like, launch);
    case Kernel::mma: return run_mma(p, type, c, q, like, launch);
    case Kernel::small: return sm90::small_product(small_problem(p, type, c.slices), launch.stream);
    default: return run_tiles(p, type, c, q, like, launch);
  }
}

namespace {

// A pass over rows that GradientPass can read.
bool whole_rows(const Backward& b) {
  const int64_t ld = b.grad.row_stride;
  return b.grad.col_stride == 1 && ld % 8 == 0 && ld >= b.N && b.N % 8 == 0 && aligned(b.grad.data) &&
         b.M <= int64_t{128} * 65535 && b.N <= INT32_MAX - 255 && (b.act == Act::none || aligned(b.saved.data));
}

bool lies_alike(const Backward& b) {
  return b.act == Act::none || (b.saved.row_stride == b.grad.row_stride && b.saved.col_stride == b.grad.col_stride);
}

sm90::GradientPass gradient_pass_of(const Backward& b, Type type) {
  sm90::GradientPass pass{};
  pass.M = static_cast<int32_t>(b.M);
  pass.N = static_cast<int32_t>(b.N);
  pass.ld = b.grad.row_stride;
  pass.type = type;
  pass.act = b.act;
  pass.grad = b.grad.data;
  pass.saved = b.saved.data;
  return pass;
}

void run_together(
    const Backward& b, const Product& dw, const Product& dx, const Together& t, Type type, const Tensor& like,
    const Launch& launch) {
  sm90::SmallProblem w = small_problem(dw, type, t.dw_slices), x = small_problem(dx, type, t.dx_slices);
  std::optional<Tensor> out;
  if (t.pass) {
    sm90::GradientPass pass = gradient_pass_of(b, type);
    out = bytes(like, b.M * b.grad.row_stride * element_bytes(type));
    pass.out = out->mutable_data_ptr();
    sm90::gradient_pass(pass, launch.stream);
    w.a.data = x.a.data = pass.out;
  } else if (b.act != Act::none) {
    w.saved = x.saved = b.saved.data;
    w.through = x.through = b.act;
  }
  w.sums = b.bias_grad;
  sm90::small_backward(w, x, launch.stream);
}

}  // namespace

bool run_backward(const Backward& b, const Tensor& like, const Launch& launch) {
  const Type type = type_of(like);
  if (allows_gemv(std::getenv("ZOO_LINEAR_KERNEL")) && few_rows_takes(b, type)) {
    const int processors = chip_of(launch.device).processors;
    const int64_t size = few_rows_workspace(b, type, processors);
    std::optional<Tensor> workspace;
    if (size) workspace = bytes(like, size);
    few_rows_backward(b, type, processors, size ? workspace->mutable_data_ptr() : nullptr, launch.stream);
    return true;
  }
  const int64_t ld = b.grad.row_stride;
  if (type == Type::f64 || b.M == 0 || b.N == 0 || b.K == 0 || !lies_alike(b)) return false;
  Product dx{}, dw{};
  dx.batch = dw.batch = 1;
  dx.M = b.M, dx.N = b.K, dx.K = b.N;
  dx.b = b.weight;
  dx.y = b.input_grad;
  dw.M = b.N, dw.N = b.K, dw.K = b.M;
  dw.b = b.input;
  dw.y = b.weight_grad;
  dx.a = {b.grad.data, 0, ld, b.grad.col_stride};
  dw.a = {b.grad.data, 0, b.grad.col_stride, ld};
  const Query dx_query = query_of(dx, type, launch), dw_query = query_of(dw, type, launch);
  const char* forced = std::getenv("ZOO_LINEAR_KERNEL");
  if (dx_query.capability != 90 || !dx_query.hopper || forces_raw(forced)) return false;
  const bool whole = whole_rows(b);
  const int act = static_cast<int>(b.act);
  const Apart apart = choose_apart(
      b.weight_grad ? &dw_query : nullptr, b.input_grad ? &dx_query : nullptr, act, b.bias_grad != nullptr, whole, forced);
  if (b.input_grad && b.weight_grad) {
    const Together t = choose_together(dw_query, dx_query, act, apart.microseconds, forced);
    if (t.better && (!t.pass || whole)) {
      run_together(b, dw, dx, t, type, like, launch);
      return true;
    }
  }
  if (!whole) return false;
  const bool products = b.input_grad || b.weight_grad, changed = b.act != Act::none;

  sm90::GradientPass pass = gradient_pass_of(b, type);
  pass.sums = b.bias_grad;
  std::optional<Tensor> out, partial;
  if (apart.planes) {
    sm90::Planes& p = pass.planes;
    const auto three = [](const Choice& c) { return c.kernel == Kernel::split6; };
    p.count = (b.input_grad && !apart.raw_dx && three(apart.dx)) || (b.weight_grad && three(apart.dw)) ? 3 : 2;
    p.planes_ld = b.N;
    p.plane = b.M * b.N;
    out = bytes(like, plane_bytes(p) + 4 * sm90::gradient_flags(pass.M, pass.N));
    p.planes = out->mutable_data_ptr();
    p.flags = reinterpret_cast<int32_t*>(static_cast<char*>(p.planes) + plane_bytes(p));
  } else if (products && changed) {
    out = bytes(like, b.M * ld * element_bytes(type));
    pass.out = out->mutable_data_ptr();
  }
  const int64_t chunks = sm90::gradient_chunks(pass.M, pass.N);
  if (b.bias_grad && chunks > 1) {
    partial = bytes(like, 4 * b.N * chunks);
    pass.partial = static_cast<float*>(partial->mutable_data_ptr());
  }
  if (apart.planes || changed || b.bias_grad) sm90::gradient_pass(pass, launch.stream);
  if (changed && !apart.planes) dx.a.data = dw.a.data = pass.out;
  if (b.input_grad && (!apart.planes || apart.raw_dx)) run_product(dx, like, launch);
  if (b.weight_grad && !apart.planes) run_product(dw, like, launch);
  if (!apart.planes) return true;
  sm90::Operand a{};
  a.data = pass.planes.planes;
  a.ld = pass.planes.planes_ld;
  a.plane = pass.planes.plane;
  a.source = static_cast<const float*>(b.grad.data);
  a.flags = pass.planes.flags;
  a.flag_count = sm90::gradient_flags(pass.M, pass.N);
  a.saved = changed ? static_cast<const float*>(b.saved.data) : nullptr;
  a.act = b.act;
  if (b.input_grad && !apart.raw_dx) {
    a.mn = false, a.source_row = ld, a.source_k = 1;
    run_tiles(dx, type, apart.dx, dx_query, like, launch, &a);
  }
  if (b.weight_grad) {
    a.mn = true, a.source_row = 1, a.source_k = ld;
    if (apart.turn) {
      Product x{};
      x.batch = 1, x.M = b.K, x.N = b.N, x.K = b.M;
      x.a = {b.input.data, 0, b.input.col_stride, b.input.row_stride};
      x.b = dx.a;
      x.y = b.weight_grad;
      run_tiles(x, type, apart.dw, turned(dw_query), like, launch, nullptr, &a);
    } else {
      run_tiles(dw, type, apart.dw, dw_query, like, launch, &a);
    }
  }
  return true;
}

}  // namespace zoo::cuda
