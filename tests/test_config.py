"""Overrides -> setups.

Rules protected here:
- A comma list makes a grid; a setting goes to each listed choice that has it; equal setups run once.
- An experiment's overrides stand before the user's own, which win.
- Settings are typed by the class they go to; a class of the user's own needs no registration.
- Every mistake is a UserError of one line that names what would be right.
"""

import shutil
import sys
from dataclasses import replace

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from structkv_bench import catalog
from structkv_bench.calibrate.running import RunningText
from structkv_bench.choice import Choice, build
from structkv_bench.config import compose
from structkv_bench.errors import UserError

BASELINES = ["full", "streaming_llm", "snapkv", "h2o", "structkv"]

OWN = """
from dataclasses import dataclass
from structkv_bench.engine.method import Compressor, Method
from structkv_bench.errors import UserError

@dataclass(frozen=True)
class Own(Method):
    kv_ratio: float = 0.5
    foo: int = 3
    ratios: list[float] | None = None

    def __post_init__(self):
        if self.foo == 13:
            raise UserError("foo=13: brings bad luck")
        if self.foo == 14:
            raise ValueError("foo is 14")

    def compressor(self, prompt_tokens, layers):
        return Compressor()

@dataclass(frozen=True)
class Needs(Own):
    must: int = "???"

class NoDataclass:
    pass
"""


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """A copy of conf/ that a test may change."""
    folder = tmp_path / "conf"
    shutil.copytree(catalog.conf_dir(), folder)
    monkeypatch.setattr(catalog, "conf_dir", lambda: folder)
    return folder


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's, somewhere on the path."""
    (tmp_path / "own_methods.py").write_text(OWN)
    (tmp_path / "broken_methods.py").write_text("import does_not_exist")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_methods.Own"
    sys.modules.pop("own_methods", None)


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as error:
        compose(list(overrides))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_no_overrides_give_the_defaults():
    (setup,) = compose([])
    assert (setup.model.name, setup.method_name, setup.task_name) == ("smollm2_135m", "structkv", "niah")
    assert setup.results_dir == "results/runs"


def test_every_shipped_choice_composes():
    for group in ("model", "method", "task"):
        for name in catalog.choices(group):
            missing = ["model.path=some/where"] if name == "custom" else []
            assert len(compose([f"{group}={name}", *missing])) == 1


def test_every_shipped_experiment_composes():
    for name in catalog.choices("experiment"):
        assert compose([f"experiment={name}"])


def test_a_ratio_list_over_five_methods_gives_nine_setups():
    setups = compose([f"method={','.join(BASELINES)}", "method.kv_ratio=0.1,0.2"])
    assert [(s.method_name, getattr(s.method, "kv_ratio", None)) for s in setups] == [
        ("full", None),
        *((name, ratio) for name in BASELINES[1:] for ratio in (0.1, 0.2)),
    ]


def test_all_groups_and_settings_multiply():
    setups = compose(
        ["model=smollm2_135m,qwen2_5_7b", "task=niah,ruler", "task.samples=3,4", "task.lengths=[64]"]
    )
    assert len(setups) == 2 * 2 * 2
    assert {s.task.samples for s in setups} == {3, 4}


def test_a_list_in_brackets_is_one_value():
    (setup,) = compose(["task.lengths=[2048,4096]"])
    assert setup.task.lengths == [2048, 4096]
    assert [s.task.lengths for s in compose(["task.lengths=[64],[128,256]"])] == [[64], [128, 256]]


def test_the_same_setup_twice_runs_once():
    assert len(compose(["method=full,full", "task.samples=3,3"])) == 1


def test_numbers_become_what_their_field_says():
    (setup,) = compose(["method=snapkv", "method.kv_ratio=1", "method.budget=null"])
    assert isinstance(setup.method.kv_ratio, float)
    assert setup.method.budget is None


def test_results_dir_is_any_folder():
    assert compose(["results_dir=/some/where"])[0].results_dir == "/some/where"
    assert compose(["results_dir='/sömewhere else/a=b'"])[0].results_dir == "/sömewhere else/a=b"


def test_a_custom_model_is_called_by_its_path_unless_named():
    assert compose(["model=custom", "model.path=a/b"])[0].model.name == "a/b"
    assert compose(["model=custom", "model.path=a/b", "model.name=mine"])[0].model.name == "mine"


def test_an_experiment_says_what_its_overrides_say():
    typed = ["model=smollm2_135m", f"method={','.join(BASELINES)}", "method.kv_ratio=0.2", "task=ruler"]
    typed += ["task.subset=[niah_single_1]", "task.lengths=[2048,4096]", "task.samples=10"]
    setups = compose(["experiment=quickstart"])
    assert {setup.experiment for setup in setups} == {"quickstart"}
    assert [replace(setup, experiment=None) for setup in setups] == compose(typed)


def test_the_users_overrides_win_over_an_experiment():
    setups = compose(["experiment=quickstart", "task.samples=5", "method=snapkv"])
    assert [(s.method_name, s.task.samples, s.method.kv_ratio) for s in setups] == [("snapkv", 5, 0.2)]


def test_an_experiments_setting_may_lack_a_taker_once_the_user_replaced_its_choice():
    assert [s.method_name for s in compose(["experiment=quickstart", "method=full", "task=niah"])] == ["full"]


def test_grids_of_an_experiment_run_one_after_the_other(conf):
    (conf / "experiment/two.yaml").write_text(
        "description: two\noverrides: [task.samples=3]\n"
        "grids:\n  - [method=full]\n  - ['method=snapkv,h2o', 'method.kv_ratio=0.3']\n"
    )
    setups = compose(["experiment=two", "method.window=4"])
    assert [(s.method_name, s.task.samples) for s in setups] == [("full", 3), ("snapkv", 3), ("h2o", 3)]
    assert {s.method.window for s in setups[1:]} == {4}
    assert "did you mean window?" in refused("experiment=two", "method.windo=4")
    assert len(compose(["experiment=two,quickstart"])) == 3 + 5
    (conf / "experiment/none.yaml").write_text("grids: []\n")
    [setup] = compose(["experiment=none"])
    assert [replace(setup, experiment=None)] == compose([])


def test_a_choice_may_build_on_another_by_its_defaults_list(conf):
    (conf / "method/narrow.yaml").write_text("# SnapKV, narrow\ndefaults: [snapkv, _self_]\nwindow: 4\n")
    (setup,) = compose(["method=narrow"])
    assert (setup.method_name, setup.method.window) == ("narrow", 4)
    assert type(setup.method) is type(compose(["method=snapkv"])[0].method)


@pytest.mark.parametrize("key", ["method.foo", "+method.foo", "++method.foo"])
def test_a_class_anywhere_on_the_path_is_a_method(own, key):
    (setup,) = compose([f"method._target_={own}", f"{key}=7"])
    assert (setup.method_name, setup.method.foo) == ("Own", 7)


def test_a_given_class_takes_from_the_chosen_file_what_it_knows(own):
    assert compose(["method=snapkv", f"method._target_={own}"])[0].method.kv_ratio == 0.1
    assert compose(["method=full", f"method._target_={own}"])[0].method.kv_ratio == 0.5
    assert "did you mean foo?" in refused(f"method._target_={own}", "method.fooo=1")


def test_a_method_with_a_file_of_its_own_needs_no_registration(own, conf):
    (conf / "method/mine.yaml").write_text(f"# Mine\n_target_: {own}\nfoo: 5\n")
    (setup,) = compose(["method=mine", "method.ratios=[0.1,1]"])
    assert (setup.method_name, setup.method.foo, setup.method.ratios) == ("mine", 5, [0.1, 1.0])
    assert ("mine", "Mine") in catalog.described("method")


def test_what_a_class_says_of_a_value_gets_through(own):
    assert refused(f"method._target_={own}", "method.foo=13") == "method.foo=13: brings bad luck"
    assert "foo is 14" in refused(f"method._target_={own}", "method.foo=14")


def test_hydra_opened_by_the_program_around_is_no_obstacle():
    with initialize_config_dir(str(catalog.conf_dir()), version_base=None):
        assert len(compose([])) == 1
    GlobalHydra.instance().clear()
    assert len(compose([])) == 1
    assert not GlobalHydra.instance().is_initialized()


MISTAKES = {
    "modle=x": ["modle", "model, method, task, protocol, experiment, results_dir", "did you mean model?"],
    "metod.kernel=3": ["metod.kernel", "did you mean method?"],
    "method=snapk": ["method=snapk", ", ".join(catalog.choices("method")), "did you mean snapkv?"],
    "method=": ["method=", "snapkv"],
    "method=null": ["method=None", "snapkv"],
    "method=[full,snapkv]": ["method=", "snapkv"],
    "method=full,snapk": ["method=snapk:", "did you mean snapkv?"],
    "experiment=quickstar": ["experiment=quickstar", "did you mean quickstart?"],
    "method=snapkv method.kernal=3": ["method.kernal", "snapkv", "window", "did you mean kernel?"],
    "method=full method.window=3": ["method.window", "full", "it has none"],
    "method=full,snapkv method.foo=3": ["method.foo", "full, snapkv", "kernel"],
    "method.window.deep=3": ["method.window.deep", "window"],
    "method=snapkv method.window=abc": ["method.window=abc", "expected int"],
    "method=snapkv method.window=1.5": ["method.window=1.5", "expected int"],
    "method=snapkv method.window=true": ["method.window=True", "expected int"],
    "method=snapkv method.window=null": ["method.window=None", "expected int"],
    "method=snapkv method.kv_ratio=0.1,abc": ["method.kv_ratio=abc", "expected float"],
    "method=snapkv method.budget=abc": ["method.budget=abc", "expected int | None"],
    "method.kv_ratio=2": ["kv_ratio=2.0"],
    "method.kv_ratio=nan": ["kv_ratio=nan"],
    "task.lengths=2.5": ["task.lengths=2.5", "expected a list such as [2048,4096]"],
    "task.lengths=[a]": ["task.lengths=['a']", "expected a list such as [2048,4096]"],
    "task.lengths={a:1}": ["task.lengths={'a': 1}", "expected a list such as [2048,4096]"],
    "model.dtype=int8": ["model.dtype=int8", "float32, bfloat16, float16"],
    "model.max_positions=0": ["model.max_positions=0"],
    "model=custom": ["model.path", "custom"],
    "model.path=${nowhere}": ["model=smollm2_135m", "nowhere"],
    "method._target_=not_there.Method": ["method._target_=not_there.Method", "PYTHONPATH"],
    "method._target_=structkv_bench.methods.full.Fuller": [
        "method._target_=structkv_bench.methods.full.Fuller"
    ],
    "method._target_=abc": ["method._target_=abc"],
    "method._target_=own_methods.NoDataclass": ["not a dataclass", "structkv_bench.engine.method.Method"],
    "method._target_=own_methods.Needs": ["method.must", "Needs"],
    "method._target_=broken_methods.X": ["method._target_=broken_methods.X", "does_not_exist"],
    "method._target_=structkv_bench.engine.method.Method": ["method=Method", "abstract"],
    "task._target_=own_methods.Own": ["not a dataclass", "structkv_bench.task.Task"],
    "word": ["word", "key=value"],
    "method=full,": ["method=full,", "key=value"],
    "task.lengths=[1,2": ["task.lengths=[1,2", "key=value"],
    "=full": ["=full"],
    "~method": ["~method", "key=value"],
    "method@other=full": ["method@other=full", "key=value"],
    "method=full method=snapkv": ["method", "twice", "method=first,second"],
    "method.kv_ratio=range(0,1)": ["method.kv_ratio=first,second"],
    "method=glob(*)": ["method=first,second"],
    "results_dir=a,b": ["results_dir", "one folder"],
    "results_dir=": ["results_dir", "one folder"],
    "results_dir=null": ["results_dir", "one folder"],
    "results_dir=[a,b]": ["results_dir", "one folder"],
    "results_dir.x=1": ["results_dir.x"],
    "hydra.run.dir=x": ["hydra.run.dir"],
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_one_line_that_names_what_would_be_right(own, overrides):
    message = refused(*overrides.split())
    for part in MISTAKES[overrides]:
        assert part in message


FILES = {
    "method/bad.yaml": ("_target_: [1\nfoo: 2", "method=bad", "conf/method/bad.yaml"),
    "method/gone.yaml": ("defaults: [nowhere]\n", "method=gone", "nowhere"),
    "method/empty.yaml": ("", "method=empty", "method._target_"),
    "method/typo.yaml": ("_target_: structkv_bench.methods.full.Full\nwindo: 3\n", "method=typo", "windo"),
    "task/latin.yaml": ("_target_: \xff", "task=latin", "conf/task/latin.yaml"),
    "experiment/bad.yaml": ("overrides: [1\n", "experiment=bad", "conf/experiment/bad.yaml"),
    "experiment/typo.yaml": ("override: [method=full]\n", "experiment=typo", "did you mean overrides?"),
    "experiment/flat.yaml": ("overrides: {method: full}\n", "experiment=flat", "expected a list such as"),
    "experiment/nested.yaml": ("overrides: [experiment=quickstart]\n", "experiment=nested", "another"),
    "experiment/wrong.yaml": (
        "overrides: [method=full, method.windo=3]\n",
        "experiment=wrong",
        "method.windo",
    ),
    "experiment/dirs.yaml": ("grids: [[results_dir=a], [results_dir=b]]\n", "experiment=dirs", "one folder"),
}


@pytest.mark.parametrize("file", FILES)
def test_a_broken_config_file_is_one_line(conf, file):
    content, override, expected = FILES[file]
    (conf / file).write_bytes(content.encode("latin-1"))
    assert expected in refused(override)


def test_a_home_folder_or_a_foreign_letter_needs_no_quotes():
    """What a shell passes on as typed is taken as typed."""
    assert compose(["results_dir=~/runs"])[0].results_dir == "~/runs"
    assert compose(["model=custom", "model.path=~/modèle"])[0].model.path == "~/modèle"
    assert "choose one of adakv, " in refused("method=é")


def test_another_path_is_another_model():
    """Rows of a model never stand under the name of the one whose config it borrows."""
    assert compose(["model.path=some/where"])[0].model.name == "some/where"
    assert compose(["model.path=some/where", "model.name=mine"])[0].model.name == "mine"


def test_one_value_is_a_list_of_one_where_a_list_is_asked_for():
    assert compose(["task=ruler", "task.subset=vt", "task.lengths=64"])[0].task.subset == ["vt"]
    shares = Choice("calibration", "headwisekv", {}, RunningText)
    assert build(shares, {"ratios": 0.2}).ratios == [0.2]
    with pytest.raises(UserError, match=r"ratios=many: expected a list such as \[0\.1,0\.2\]"):
        build(shares, {"ratios": "many"})


@pytest.mark.parametrize(
    "override",
    ["method.entropy_weight=nan", "method.pivot_floor=inf", "method.kv_ratio=???", "model.name=''"],
)
def test_values_that_mean_nothing_are_refused(override):
    assert override.split("=")[0] in refused(override)


def test_a_protocol_sets_what_a_choice_has_and_yields_to_the_user():
    """Its settings stand in the cell's config; choices without one of them are left alone."""
    setups = compose(["protocol=paper", "method=full,snapkv,structkv", "task=ruler"])
    assert {setup.protocol for setup in setups} == {"paper"}
    assert {setup.task.prefix_in for setup in setups} == {"user"}
    assert [getattr(setup.method, "heads", None) for setup in setups] == [None, "query", None]
    (own,) = compose(["protocol=paper", "method=snapkv", "method.heads=kv", "task=niah"])
    assert own.method.heads == "kv"
    both = compose(["protocol=official,paper", "method=h2o", "task=ruler"])
    assert [(setup.protocol, setup.method.heads) for setup in both] == [
        ("official", "kv"),
        ("paper", "query"),
    ]


def test_every_shipped_protocol_composes():
    for name in catalog.choices("protocol"):
        assert compose([f"protocol={name}"])[0].protocol == name
