"""`import verl...` without verl: the native modules under their other names, and nothing where verl is installed."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import polyturn.interactions.gsm8k
import polyturn.rewards.gsm8k
import polyturn.tools.base
import polyturn.tools.schema
from polyturn import compat
from polyturn.compat.namespaces import VERL
from polyturn.compat.verl import torchrun
from polyturn.compat.verl_config.command import tell_unread_checkout
from polyturn.core.errors import ConfigError, UnknownNameError
from polyturn.infra.plugins import import_attr, import_file
from polyturn.interactions.registry import initialize_interactions_from_config
from polyturn.tools.registry import initialize_tools_from_config
from support.refusals import refuses

pytestmark = pytest.mark.timeout(300)  # a process has to start


@pytest.fixture(autouse=True)
def _as_if_never_imported() -> Iterator[None]:
    compat.uninstall("verl")
    yield
    compat.uninstall("verl")


def test_alias_is_the_native_module() -> None:
    assert compat.install("verl")
    search = importlib.import_module("verl.tools.search_tool")
    assert search is polyturn.tools.search is sys.modules["verl.tools.search_tool"]
    assert polyturn.tools.search.__spec__ is not None
    assert polyturn.tools.search.__spec__.name == polyturn.tools.search.__name__ == "polyturn.tools.search"
    names: dict[str, object] = {}
    exec(
        "from verl.interactions.base import BaseInteraction\n"
        "from verl.utils.reward_score import gsm8k\n"
        "import verl.tools.search_tool as search",
        names,
    )
    assert names["BaseInteraction"] is polyturn.BaseInteraction
    assert (names["gsm8k"], names["search"]) == (polyturn.rewards.gsm8k, search)


async def test_replaced_scorer_reaches_the_native_classes() -> None:
    compat.install("verl")
    partner = polyturn.interactions.gsm8k.Gsm8kInteraction({})
    await partner.start_interaction("e", ground_truth="5")
    with patch("verl.utils.reward_score.gsm8k.compute_score", return_value=1.0) as scorer:
        done, _, score, _ = await partner.generate_response("e", [{"role": "assistant", "content": "no"}])
    assert (done, score) == (True, 1.0)
    scorer.assert_called_once_with("no", "5", method="strict", format_score=0.0, score=1.0)


def test_install_is_idempotent_and_uninstall_forgets() -> None:
    before = len(sys.meta_path)
    assert compat.install("verl")
    assert compat.install("verl")
    assert len(sys.meta_path) == before + 1
    importlib.import_module("verl.tools.schemas")
    compat.uninstall("verl")
    compat.uninstall("verl")
    assert len(sys.meta_path) == before
    assert not [n for n in sys.modules if n.partition(".")[0] == "verl"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("verl.tools.schemas")


def test_importing_the_compat_package_installs_it() -> None:
    code = "import polyturn.compat.verl, verl.tools.base_tool as m; print(m.BaseTool.__module__)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == "polyturn.compat.verl.base_tool"


def test_unknown_names_say_what_there_is(tmp_path: Path) -> None:
    compat.install("verl")
    with pytest.raises(ModuleNotFoundError, match=r"'verl.interactions.tutor'.*verl.interactions has base, "):
        importlib.import_module("verl.interactions.tutor")
    with pytest.raises(ImportError):
        exec("from verl.tools import nothing_like_this")
    refuses(lambda: compat.install("verI"), UnknownNameError, "'verI'")
    (tmp_path / "mine.py").write_text("import surely_not_installed\n")
    refuses(lambda: import_attr("mine.py:Mine", base=tmp_path), ConfigError, "'surely_not_installed'")
    refuses(lambda: import_attr("verl.tools.no_such_tool.Tool"), ConfigError, "verl.tools has base_tool")


def test_missing_program_of_verl_names_its_replacement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compat.install("verl")
    for name, said in (("ppo.ray_trainer", "a program built from them does not run"), ("main_eval", "polyturn rescore")):
        with pytest.raises(ModuleNotFoundError, match=said):
            importlib.import_module(f"verl.trainer.{name}")
    started: list[str] = []
    monkeypatch.setattr(torchrun.runpy, "run_module", lambda name, **_: started.append(name))
    monkeypatch.setattr(sys, "argv", ["torchrun", "--nproc_per_node", "", "-m", "verl.trainer.fsdp_sft_trainer", "a=b"])
    with pytest.raises(SystemExit):
        torchrun.main()
    assert "polyturn sft" in capsys.readouterr().err and not started
    monkeypatch.setattr(sys, "argv", ["torchrun", "-m", "mine.train", "-m"])
    torchrun.main()
    assert started == ["torch.distributed.run"]


def test_installed_verl_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "verl"
    package.mkdir()
    (package / "__init__.py").write_text("is_real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not compat.install("verl")
    assert importlib.import_module("verl").is_real
    with pytest.raises(ConfigError, match=r"verl that is installed has no such module.*name the class under polyturn"):
        import_attr("verl.interactions.gsm8k_interaction.Gsm8kInteraction")
    assert not compat.install("verl")
    del sys.modules["verl"]


def test_folder_named_verl_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl" / "data").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("verl")
    assert import_attr("verl.interactions.base.BaseInteraction") is polyturn.BaseInteraction
    assert importlib.import_module("verl.tools.schemas").ToolResponse is polyturn.tools.schema.ToolResponse


def test_every_listed_module_is_there() -> None:
    compat.install("verl")
    for name, native in VERL.modules.items():
        assert importlib.import_module(name) is importlib.import_module(native)


def test_package_shares_the_names_of_its_body() -> None:
    compat.install("verl")
    package = importlib.import_module("verl.utils.reward_score")
    body = importlib.import_module("polyturn.compat.verl.reward_score")
    assert package.default_compute_score is body.default_compute_score
    assert "default_compute_score" in dir(package)
    with patch("verl.utils.reward_score.default_compute_score", return_value=0.5):
        assert body.default_compute_score("openai/gsm8k", "", "") == 0.5
    assert body.default_compute_score("openai/gsm8k", "#### 4", "4") == 1.0
    loops = importlib.import_module("verl.experimental.agent_loop")
    inner = importlib.import_module("verl.experimental.agent_loop.agent_loop")
    assert loops.AgentLoopBase is inner.AgentLoopBase and loops.agent_loop is inner
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


def test_config_that_names_a_class_installs_verl() -> None:
    found = initialize_interactions_from_config(
        {"interaction": [{"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}]}
    )
    assert type(found["gsm8k"]) is polyturn.interactions.gsm8k.Gsm8kInteraction
    (tool,) = initialize_tools_from_config({"tools": [{"class_name": "verl.tools.gsm8k_tool.Gsm8kTool"}]})
    assert tool.name == "calc_gsm8k_reward"


def test_plugin_file_that_imports_verl_installs_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from verl.tools.base_tool import BaseTool\nclass Mine(BaseTool): ...\n")
    assert issubclass(import_attr("mine.py:Mine", base=tmp_path), polyturn.tools.base.BaseTool)


@pytest.mark.parametrize(
    "alias", ["verl.utils.reward_score.math_dapo", "verl.utils.reward_score.gsm8k", "verl.utils.tokenizer"]
)
def test_module_is_the_same_from_its_package(alias: str) -> None:
    """Also if the native module of the package imports another module of that name."""
    compat.uninstall("verl")
    compat.install("verl")
    package, _, name = alias.rpartition(".")
    taken = getattr(__import__(package, fromlist=[name]), name)
    assert taken is importlib.import_module(alias)
    everything: dict[str, object] = {}
    exec(f"from {package} import *", everything)
    assert name not in everything and len(everything) > 2


def test_run_says_that_a_checkouts_modules_are_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tell_unread_checkout()
    assert caplog.text == ""  # there is no checkout
    file = tmp_path / "verl/trainer/config/ppo_trainer.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# mine\n")
    monkeypatch.chdir(tmp_path)
    tell_unread_checkout()
    assert f"{tmp_path}: modules of verl are not loaded" in caplog.text


REGISTERS = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register as agent
from verl.tools.function_tool import function_tool
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
from verl.workers.reward_manager import register
from polyturn.algorithms.advantages import advantages

@register_adv_est("twice_named")
def estimate(token_level_rewards, response_mask, **kwargs):
    return token_level_rewards, token_level_rewards

@register_policy_loss("twice_named")
def loss(old_log_prob, log_prob, advantages, response_mask, **kwargs):
    return log_prob.sum(), {}

@register("twice_named")
class Manager:
    pass

@function_tool("twice_named")
def look_up(query: str) -> str:
    '''Look something up.

    Args:
        query: What.
    '''
    return query

@agent("twice_named")
class Loop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        pass

@advantages.register("twice_named_native")
def native(rewards, samples):
    return []
"""


def test_file_under_two_names_registers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once as `file.py` of a config, and once as a module of the project."""
    compat.install("verl")
    (tmp_path / "my_registrations.py").write_text(REGISTERS)
    monkeypatch.syspath_prepend(tmp_path)
    first, second = import_file(tmp_path / "my_registrations.py"), importlib.import_module("my_registrations")
    assert first is not second
    (tmp_path / "others.py").write_text(REGISTERS)
    refuses(lambda: import_file(tmp_path / "others.py"), ConfigError, "already been registered")


OF_A_LOOP = """
from polyturn.infra.plugins import Registry
from verl.workers.reward_manager import register

things = Registry("things")
for size in (1, 2):
    @REGISTER("of_a_loop")
    class Manager:
        def __call__(self, data):
            return size
"""


@pytest.mark.parametrize("registers", ["register", "things.register"])
def test_class_of_a_loop_replaces_no_other(registers: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(OF_A_LOOP.replace("REGISTER", registers))
    refuses(lambda: import_file(tmp_path / "loop.py"), ConfigError, "of_a_loop", "registered")
