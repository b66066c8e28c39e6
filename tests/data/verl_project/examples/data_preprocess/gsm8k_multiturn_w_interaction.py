"""Write GSM8K as tasks whose answer is graded by the interaction `gsm8k`, turn by turn.

python3 examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_save_dir ~/data/gsm8k
"""

from __future__ import annotations

from _arguments import prepare

if __name__ == "__main__":
    prepare(variant="interaction", description="Write GSM8K for a run with the interaction gsm8k.")
