"""Coming from a memory profiler with µ-TWO: the recorded step, its peak, and the selection."""

from shared import assert_equal, train

import leanstep

NAME, SIZE = "gpt2-tiny", {"batch": 4}

plain = train(*leanstep.models.build(NAME, **SIZE))

model, batch, loss, optimizer = leanstep.models.build(NAME, **SIZE)
profile = leanstep.profile(model, batch, loss, optimizer=optimizer)

# The graph of the whole step: each op with its time, module and source line.
graph = profile.graph
slowest = max(range(len(graph.ops)), key=profile.seconds)
op = graph.ops[slowest]
print(f"slowest of {len(graph.ops)} ops: {op.name} in {op.phase}, {op.source}")

# The tensors by category, and what the peak is made of.
activations = [s for s in graph.storages if s.category == "activation"]
print(f"{len(activations)} activations, {sum(s.nbytes for s in activations)} bytes in all")
print(leanstep.simulate(profile))

# µ-TWO's selection, and how far it is from the best.
for solver in ("mu_two", "optimal"):
    plan = leanstep.plan(profile, "70%", solver=solver)
    print(f"{solver}: {plan.peak_bytes} bytes, {plan.proof}")

# Its recomputation, run in backward.
fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="70%", solver="mu_two")
assert_equal(plain, train(model, batch, loss, optimizer))
