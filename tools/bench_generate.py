"""Generation at t = 1 beside transformers with its KV cache: SmolLM2-135M, float32, greedy, the same prompt and text.

    python tools/bench_generate.py            # 12 pairs of 24 tokens

Both run in this process, in turns, so that what else the machine does hits both alike; the ratio is the median over
pairs. A null, ours against ours, says how much of it is noise.
"""

import sys
import time
from statistics import median

import torch
import transformers

from tpcode.checkpoint import smollm2, smollm2_file, smollm2_tokenizer
from tpcode.generate import generate

PROMPT, TOKENS = "The capital of France is", 24


def main(pairs: int) -> None:
    ids = torch.tensor([smollm2_tokenizer().encode(PROMPT).ids])
    ours, theirs = smollm2(), their_model()

    def our_text():
        return [int(token) for token in generate(ours, ids, TOKENS)]

    def their_text():
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, **options)
        return out[0, ids.shape[1] :].tolist()

    assert our_text() == their_text()  # warms both up, too
    times = [[seconds(run) for run in (our_text, their_text, our_text)] for _ in range(pairs)]
    print(f"{torch.get_num_threads()} threads, {TOKENS} tokens after {ids.shape[1]}, {pairs} pairs")
    for name, mine in (("tpcode, t = 1", 0), ("transformers", 1)):
        print(f"  {name:14} {1e3 * median(pair[mine] for pair in times) / TOKENS:6.1f} ms a token")
    print(f"  tpcode / transformers {median(a / b for a, b, _ in times):.2f}")
    print(f"  tpcode / tpcode       {median(a / c for a, _, c in times):.2f}")


def their_model():
    """As transformers reads the same file."""
    file = smollm2_file()
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()


def seconds(run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
