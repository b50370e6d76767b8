"""`python -m tpcode` is `tpcode`; so torchrun can start it: `torchrun --nproc-per-node 2 -m tpcode bench`."""

from tpcode.cli import main

if __name__ == "__main__":
    main()
