"""The suites of bench.py. A contestant of ours is (config, spread, slices, group)."""

S = dict

OF16, OF32 = (0, 1, 2, 4, 5), (0, 1, 3, 6)


def smoke():
    """Smallest first: each kind of kernel once."""
    for type, configs in (("bf16", OF16), ("f32", OF32)):
        for config in configs:
            yield S(type=type, config=config, M=128, N=128, K=64)
            yield S(type=type, config=config, M=200, N=192, K=200, act="gelu", z=1)
            yield S(type=type, config=config, M=200, N=192, K=2048, spread=1)
            yield S(type=type, config=config, M=2048, N=3072, K=768, act="gelu")


def edges16():
    for layout in (0, 1, 2):
        for config in OF16:
            for M, N, K in ((256, 256, 64), (200, 1000, 784), (1000, 200, 96), (64, 768, 768)):
                yield S(type="bf16", layout=layout, config=config, M=M, N=N, K=K, act="gelu", z=1)
            yield S(type="bf16", layout=layout, config=config, M=2048, N=3072, K=768)
            for spread in (1, 2):
                yield S(type="bf16", layout=layout, config=config, M=520, N=1000, K=776, spread=spread, act="relu")
                yield S(type="bf16", layout=layout, config=config, M=200, N=336, K=4096, spread=spread)
                yield S(type="bf16", layout=layout, config=config, M=1600, N=3000, K=1000, spread=spread, act="gelu", z=1)
    for M in (1, 63, 64, 65, 127, 200):
        for N in (10, 1000):
            yield S(type="bf16", config=0, M=M, N=N, K=784, act="gelu", z=1)
            yield S(type="bf16", config=4, M=M, N=N, K=96, act="silu", spread=1)
    for act in ("none", "relu", "gelu", "gelu_tanh", "silu"):
        for type in ("bf16", "fp16"):
            yield S(type=type, config=1, M=300, N=384, K=96, act=act, z=1)
        yield S(type="bf16", config=1, M=300, N=384, K=96, act=act, dist="positive")
        yield S(type="bf16", config=1, M=300, N=384, K=96, act=act, bias=False)
    for layout in (0, 1, 2):
        yield S(type="fp16", layout=layout, config=1, M=520, N=1000, K=776, spread=1)
    yield S(type="bf16", config=0, M=130, N=200, K=96, pad=8)
    yield S(type="bf16", config=0, M=130, N=201, K=96, pad=2)


def edges32():
    for layout in (0, 1, 2):
        for config in OF32:
            for M, N, K in ((256, 256, 64), (200, 1000, 784), (1000, 200, 96)):
                yield S(type="f32", layout=layout, config=config, M=M, N=N, K=K, act="gelu", z=1)
            yield S(type="f32", layout=layout, config=config, M=2048, N=3072, K=768)
            for spread in (1, 2):
                yield S(type="f32", layout=layout, config=config, M=520, N=1000, K=776, spread=spread, act="relu")
                yield S(type="f32", layout=layout, config=config, M=200, N=336, K=4096, spread=spread)
                yield S(type="f32", layout=layout, config=config, M=1600, N=3000, K=1000, spread=spread, act="gelu", z=1)
    for M in (1, 63, 64, 65, 127, 200):
        for N in (10, 1000):
            yield S(type="f32", config=0, M=M, N=N, K=784, act="gelu", z=1)
            yield S(type="f32", config=3, M=M, N=N, K=196, act="silu", spread=1)
            yield S(type="f32", layout=2, config=1, M=M, N=N, K=201)
    for act in ("none", "relu", "gelu", "gelu_tanh", "silu"):
        yield S(type="f32", config=1, M=300, N=384, K=96, act=act, z=1, show=1)
    for dist in ("normal", "positive", "large", "small"):
        for config in (0,):
            yield S(type="f32", config=config, M=300, N=384, K=4096, dist=dist, bias=False, show=1)
    for config in (0, 3):
        yield S(type="f32", config=config, M=300, N=384, K=96, special=1, spread=1)


def time32():
    M = 12608
    yield S(type="f32", M=M, N=3072, K=768, act="gelu", reps=7, ours=[(0,), (1,), (6,), (1, 0, 1, 16)])
    yield S(type="f32", M=M, N=3072, K=768, linear=1, reps=7, ours=[(0,), (1,), (6,)])
    yield S(type="f32", M=M, N=2304, K=768, linear=1, reps=7, ours=[(0, 1), (1,), (6,)])
    yield S(type="f32", M=M, N=768, K=3072, linear=1, reps=7, ours=[(0, 1), (1,), (6,)])
    yield S(type="f32", M=M, N=768, K=768, linear=1, reps=7, ours=[(1,), (6,)])
    yield S(type="f32", M=M, N=768, K=3072, layout=1, reps=7, ours=[(0,), (1,), (6,)])
    yield S(type="f32", M=M, N=3072, K=768, layout=1, reps=7, ours=[(0,), (1,), (6,)])
    yield S(type="f32", M=3072, N=768, K=M, layout=2, reps=7, ours=[(0, 1), (1, 1)])
    yield S(type="f32", M=768, N=768, K=M, layout=2, reps=7, ours=[(0, 1), (1, 1), (6, 1)])
    yield S(type="f32", M=4096, N=4096, K=4096, reps=7, ours=[(0,), (0, 1), (6, 1)])
    yield S(type="f32", M=200704, N=384, K=96, act="gelu", reps=5, ours=[(0,), (6,)])
    yield S(type="f32", M=256, N=1000, K=2048, linear=1, ours=[(3, 1), (100, 0, 2)])


def time16():
    M = 12608
    for act in ("gelu", "none", "relu", "gelu_tanh", "silu"):
        yield S(type="bf16", M=M, N=3072, K=768, act=act, linear=1, ours=[(0,), (1,), (2,)])
    yield S(type="bf16", M=M, N=3072, K=768, act="gelu", z=1, ours=[(0,), (1,), (2,)])
    yield S(type="bf16", M=M, N=2304, K=768, linear=1, ours=[(0,), (1,)])
    yield S(type="bf16", M=M, N=768, K=3072, linear=1, ours=[(0,), (1,)])
    yield S(type="bf16", M=M, N=768, K=768, linear=1, ours=[(0,), (1,)])
    yield S(type="bf16", M=M, N=768, K=3072, layout=1, ours=[(0,), (1,)])
    yield S(type="bf16", M=M, N=3072, K=768, layout=1, ours=[(0,), (1,)])
    yield S(type="bf16", M=3072, N=768, K=M, layout=2, ours=[(0, 1), (1,), (2,), (5,)])
    yield S(type="bf16", M=768, N=768, K=M, layout=2, ours=[(0, 1), (1, 1), (4, 1)])
    yield S(type="bf16", M=200704, N=384, K=96, act="gelu", ours=[(0,), (1,), (5,)])
    yield S(type="bf16", M=200704, N=96, K=384, linear=1, ours=[(0,), (1,)])
    yield S(type="bf16", M=4096, N=4096, K=4096, linear=1, ours=[(0,), (1,), (2,), (5,)])
    yield S(type="bf16", M=8192, N=8192, K=8192, reps=5, linear=1, ours=[(1,), (2,), (5,)])


def grads():
    for type in ("bf16", "fp16", "f32"):
        for act in ("none", "relu", "gelu", "gelu_tanh", "silu"):
            yield S(grad=1, type=type, M=700, N=328, act=act)
    for type in ("bf16", "f32"):
        for M, N in ((12608, 3072),):
            for act in ("gelu", "none"):
                yield S(grad=1, type=type, M=M, N=N, act=act, time=1)


def small():
    for type in ("f32", "bf16", "fp16"):
        for layout in (0, 1, 2):
            for slices in (1, 4, 8):
                for M, N, K in ((64, 64, 64), (200, 1000, 784), (1, 10, 96), (63, 333, 129), (127, 65, 1000), (3, 5, 7)):
                    yield S(type=type, layout=layout, config=100, M=M, N=N, K=K, act="gelu", z=1, slices=slices)
    for dist in ("positive", "large", "small"):
        yield S(type="f32", config=100, M=64, N=100, K=2048, slices=8, dist=dist, bias=False)
    yield S(type="f32", config=100, M=64, N=100, K=2048, slices=8, special=1)


def timesmall():
    for type in ("f32", "bf16"):
        yield S(type=type, M=64, N=1000, K=2048, linear=1, ours=[(100, 0, 4), (100, 0, 8), (3 if type == "f32" else 4, 1)])
        yield S(type=type, M=64, N=256, K=784, act="relu", ours=[(100, 0, 4), (100, 0, 8)])


def through():
    for M, N, K in ((256, 256, 64), (200, 1000, 784), (1000, 200, 96), (1300, 3072, 768)):
        yield S(through=1, type="bf16", config=20, M=M, N=N, K=K, act="gelu")
    yield S(through=1, type="bf16", config=20, M=300, N=200, K=96, act="relu")
    yield S(through=1, type="bf16", config=20, M=12608, N=3072, K=768, act="gelu", time=1)


def whole():
    M = 12608
    for type, dw in (("f32", (1, 1)), ("bf16", (1,))):
        for N, K, act in ((3072, 768, "gelu"), (2304, 768, "none"), (768, 3072, "none"), (768, 768, "none")):
            yield S(type=type, M=M, N=N, K=K, act=act, configs=((1,), (1,), (0, 1) if K == 768 and N == 768 else dw))
