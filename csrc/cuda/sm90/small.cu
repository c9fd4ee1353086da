// Launches of small.cuh's kernels: a product, or both products of a backward pass.
#include "small.cuh"

#include "launch.cuh"

namespace zoo::cuda::sm90 {

template <typename T, bool a_mn, bool b_mn>
__global__ void __launch_bounds__(kThreads, 2) small_kernel(const __grid_constant__ SmallArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  Small<T>::template run<a_mn, b_mn, false>(args.job[0], blockIdx.x, args.stages);
#endif
}

// dW = dY'^T X, whose rows' sums are db, and dX = dY' W.
template <typename T, bool through>
__global__ void __launch_bounds__(kThreads, 2) small_backward_kernel(const __grid_constant__ SmallArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const int first = args.job[0].blocks;
  if (blockIdx.x < first) Small<T>::template run<true, true, through>(args.job[0], blockIdx.x, args.stages);
  else Small<T>::template run<false, true, through>(args.job[1], blockIdx.x - first, args.stages);
#endif
}

// Along K, or along the rows where they are dense and K is not.
template <typename T>
SmallOperand operand(const Matrix& x, bool k_is_col, bool* mn) {
  const int64_t k = k_is_col ? x.col_stride : x.row_stride, outer = k_is_col ? x.row_stride : x.col_stride;
  *mn = k != 1 && outer == 1;
  SmallOperand o{x.data, *mn ? k : outer, *mn ? outer : k, false};
  o.vector = o.inner == 1 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && o.outer * int64_t(sizeof(T)) % 16 == 0;
  return o;
}

template <typename T>
SmallJob job_of(const SmallProblem& p, int cluster, bool* a_mn, bool* b_mn) {
  SmallJob job{};
  job.a = operand<T>(p.a, true, a_mn);
  job.b = operand<T>(p.b, false, b_mn);
  job.saved = p.saved;
  job.bias = p.bias;
  job.y = p.y;
  job.z = p.z;
  job.sums = p.sums;
  job.ld = p.ld;
  job.M = p.M, job.N = p.N, job.K = p.K;
  job.act = static_cast<int>(p.act), job.through = static_cast<int>(p.through);
  job.slices = p.slices;
  const int blocks = (p.M + kSide - 1) / kSide * ((p.N + kSide - 1) / kSide) * p.slices;
  job.blocks = (blocks + cluster - 1) / cluster * cluster;
  return job;
}

int steps_of(const SmallJob& job) {
  const int steps = (job.K + kStep - 1) / kStep;
  return (steps + job.slices - 1) / job.slices;
}

// Of a processor's shared memory a block takes a half: clusters of eight that take it all do not fit on the chip at once.
constexpr int kMostShared = 110 << 10;

int stages_of(int steps, int stage_bytes) {
  return std::max(std::min({steps + (steps > 1), kMostStages, kMostShared / stage_bytes}), std::min(steps, 2));
}

template <typename Kernel>
void launch(Kernel* kernel, const SmallArgs& args, int cluster, int bytes, std::atomic<uint64_t>& told, cudaStream_t stream) {
  allow_shared(kernel, kMostShared + kAligned, told);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(args.job[0].blocks + args.job[1].blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes + kAligned;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args), "small product");
}

template <typename T, bool a_mn, bool b_mn>
void launch_small(SmallArgs& args, cudaStream_t stream) {
  using S = Small<T>;
  static std::atomic<uint64_t> told{0};
  args.stages = stages_of(steps_of(args.job[0]), 2 * S::tile_bytes);
  const int bytes = std::max(args.stages * 2 * S::tile_bytes, S::sums_bytes);
  launch(small_kernel<T, a_mn, b_mn>, args, args.job[0].slices, bytes, told, stream);
}

template <typename T>
void small_of(const SmallProblem& p, cudaStream_t stream) {
  SmallArgs args{};
  bool a_mn, b_mn;
  args.job[0] = job_of<T>(p, p.slices, &a_mn, &b_mn);
  if (a_mn) {
    if (b_mn) launch_small<T, true, true>(args, stream);
    else launch_small<T, true, false>(args, stream);
  } else {
    if (b_mn) launch_small<T, false, true>(args, stream);
    else launch_small<T, false, false>(args, stream);
  }
}

template <typename T, bool through>
void launch_backward(SmallArgs& args, int cluster, cudaStream_t stream) {
  using S = Small<T>;
  static std::atomic<uint64_t> told{0};
  constexpr int stage_bytes = (through ? 3 : 2) * S::tile_bytes;
  const int steps = std::max(steps_of(args.job[0]), steps_of(args.job[1]));
  args.stages = stages_of(steps, stage_bytes);
  launch(small_backward_kernel<T, through>, args, cluster, std::max(args.stages * stage_bytes, S::sums_bytes), told, stream);
}

template <typename T>
void backward_of(const SmallProblem& dw, const SmallProblem& dx, cudaStream_t stream) {
  SmallArgs args{};
  bool mn[4];
  const int cluster = std::max(dw.slices, dx.slices);
  args.job[0] = job_of<T>(dw, cluster, mn, mn + 1);
  args.job[1] = job_of<T>(dx, cluster, mn + 2, mn + 3);
  if (!mn[0] || !mn[1] || mn[2] || !mn[3]) throw std::runtime_error("zoo: small_backward: operands of another layout");
  if (dw.saved) launch_backward<T, true>(args, cluster, stream);
  else launch_backward<T, false>(args, cluster, stream);
}

void small_product(const SmallProblem& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (p.type == Type::bf16) small_of<__nv_bfloat16>(p, s);
  else if (p.type == Type::f16) small_of<__half>(p, s);
  else small_of<float>(p, s);
}

void small_backward(const SmallProblem& dw, const SmallProblem& dx, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (dw.type == Type::bf16) backward_of<__nv_bfloat16>(dw, dx, s);
  else if (dw.type == Type::f16) backward_of<__half>(dw, dx, s);
  else backward_of<float>(dw, dx, s);
}

}  // namespace zoo::cuda::sm90
