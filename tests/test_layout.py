"""Counts from stages of one and two blocks against full runs, integer for integer."""
from __future__ import annotations
import dataclasses, random, time
import pytest
from examples.gpt.plan import build
from mpcore.analysis.dry_run import dry_run
from mpcore.analysis.layout import Counter

FLAGS = "--d-model 32 --heads 4 --d-ff 48 --seq-len 16 --global-batch 32 --micro-batch 1".split()

def same(flags, sizes, gpu=True, ranks=None):
    counter=Counter(build, gpu)
    pp=sizes.get("pp",1); world=1
    for v in sizes.values(): world*=v
    for rank in ranks or [r*world//pp for r in range(pp)]:
        a=dry_run(build,[*FLAGS,*flags],rank,gpu,**sizes)
        b=counter.rank([*FLAGS,*flags],rank,**sizes)
        for f in ("held","stages","times","peak","work_peak"):
            x,y=getattr(a,f),getattr(b,f)
            if x!=y:
                print("DIFF",flags,sizes,rank,f); show(x,y)
        if a.ledger.counts!=b.ledger.counts: print("LEDGER", a.ledger.counts, b.ledger.counts)
def show(x,y,path=""):
    if dataclasses.is_dataclass(x):
        for f in dataclasses.fields(x): show(getattr(x,f.name),getattr(y,f.name),path+"."+f.name)
    elif isinstance(x,list):
        for i,(u,v) in enumerate(zip(x,y)): show(u,v,path+f"[{i}]")
    elif isinstance(x,dict):
        for k in x.keys()|y.keys(): show(x.get(k),y.get(k),path+f"[{k}]")
    elif x!=y: print("   ",path,x,y)
if __name__=="__main__":
    for flags,sizes in [("--layers 9 --zero 3",{"pp":2,"dp":2}),
("--layers 8 --cp-kind ring",{"cp":2,"pp":2})]:
        t=time.process_time(); same(flags.split(),sizes); print(flags, sizes, round(time.process_time()-t,2))
