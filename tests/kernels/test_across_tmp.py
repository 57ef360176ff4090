import numpy as np, pytest, math, dataclasses
from typing import Any
import cupynorm
from cupynorm._dtypes import compute_dtype, dtype_of
from cupynorm.call.arguments import view
from cupynorm.invoke import bound_calls, row_ops
from cupynorm.lower.fused import Around, fused_spec
from cupynorm.ops.norm import LAYER_NORM, RMS_NORM
from cupynorm.ops.softmax import SOFTMAX, LOG_SOFTMAX
from cupynorm.plan.config import DoesNotFitError
from tests import simulator
from tests.simulator import cupy, simulated

@pytest.fixture(autouse=True)
def twins(simulated, monkeypatch):
    monkeypatch.setattr(simulator.settings, "schedules", ("forward", "reverse"))
    return simulated

def launch(spec, variant):
    plans=[]
    def go(found):
        plans.append(found.plan)
        once = (found.kernel, row_ops.launcher(found.kernel.pointer, found.plan), spec.params)
        bound_calls.bound_call(0, bound_calls.Arrays({}), [once]).once()
    row_ops.launch_what_fits(0, spec, variant, go)
    return plans[0]

def ref(op, x, gamma, beta):
    x=x.astype(np.float64)
    if op is SOFTMAX:
        e=np.exp(x-x.max(-1,keepdims=True)); return e/e.sum(-1,keepdims=True)
    if op is LAYER_NORM:
        y=(x-x.mean(-1,keepdims=True))/np.sqrt(x.var(-1,keepdims=True)+1e-5)
    else:
        y=x/np.sqrt((x*x).mean(-1,keepdims=True)+1e-5)
    return y*gamma+(beta if beta is not None else 0)

@pytest.mark.parametrize("dtype",["float32","float16","float64"])
@pytest.mark.parametrize("variant",[None,"block","cluster","shared","uncached"])
def test_it(dtype, variant):
    rng=np.random.default_rng(0)
    for op in (LAYER_NORM,RMS_NORM,SOFTMAX):
        for outer,cols,inner in ((1,5,7),(3,40,9),(1,300,33),(2,129,64),(1,1000,5),(1,1,3),(1,2500,3)):
            kind=dtype_of(dtype)
            host=(rng.standard_normal((outer,cols,inner))+1).astype(kind)
            x=cupy.asarray(host).transpose(0,2,1); y=cupy.empty((outer,cols,inner),kind).transpose(0,2,1)
            gamma=rng.uniform(.5,2,cols).astype(kind); beta=rng.standard_normal(cols).astype(kind)
            dg,db=cupy.asarray(gamma),cupy.asarray(beta)
            cols_={} if op is SOFTMAX else {"gamma":view(dg)} if op is RMS_NORM else {"gamma":view(dg),"beta":view(db)}
            compute=compute_dtype(kind,kind)
            stats=[cupy.empty((outer,inner),compute) for _ in op.stats]
            spec=fused_spec(op,view(x),1,cols_,[view(s).pointer for s in stats],1e-5,compute,Around((view(y),)))
            try: plan=launch(spec,variant)
            except DoesNotFitError as e:
                print(variant,dtype,outer,cols,inner,"no",e); continue
            want=ref(op,host.transpose(0,2,1),gamma.astype(float),beta.astype(float) if op is LAYER_NORM else None)
            tol={"float16":2e-3,"float32":2e-6,"float64":1e-13}[dtype]
            np.testing.assert_allclose(y.get().astype(float),want,rtol=tol*4,atol=tol)
            print(op.name,variant,dtype,outer,cols,inner,plan.variant,plan.vector,plan.vectors,plan.across,plan.group,plan.waits,plan.full,plan.ctas_per_row,plan.min_blocks)
