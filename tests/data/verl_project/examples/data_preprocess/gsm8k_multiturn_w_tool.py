"""Write GSM8K as tasks whose answer the model checks with the tool `calc_gsm8k_reward`.

python3 examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k
"""

from __future__ import annotations

from _arguments import prepare

if __name__ == "__main__":
    prepare(variant="tool", description="Write GSM8K for a run with the tool calc_gsm8k_reward.")
