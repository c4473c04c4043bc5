"""The demo: what each part promises, and the program as a user starts it."""

import dataclasses
import functools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmoe
from jaxmoe.demo import compare, data, model, report, run, sample, train
from jaxmoe.demo.compare import Comparison
from jaxmoe.demo.data import Corpus
from jaxmoe.demo.model import LanguageModel
from jaxmoe.demo.options import HEAD_WIDTH, SHORT, Options, choose_devices
from jaxmoe.demo.train import History, Trainer
from jaxmoe.nnx import MoE
from jaxmoe.options import ImplementationName

PROGRAM = [sys.executable, "-m", "jaxmoe.demo"]
TINY = Options(steps=3, batch=8, sequence=16, hidden=HEAD_WIDTH, layers=1)


@functools.cache
def library() -> tuple[Corpus, Corpus]:
    return data.read(data.library_folder())


# --- text -------------------------------------------------------------------------------------------------------------


def test_every_source_file_is_either_trained_on_or_held_out():
    files = list(data.source_files(data.library_folder()))
    held_out = sum(data.is_held_out(name) for name, _ in files)
    trained_on, test = library()
    assert (trained_on.num_files, test.num_files) == (len(files) - held_out, held_out)
    sizes = sum(path.stat().st_size for _, path in files)
    separators = len(files) - 2
    assert len(trained_on.content) + len(test.content) == sizes + separators


def test_a_file_keeps_its_side_on_every_machine():
    names = ["abc.py", "argparse.py", "ast.py", "email/header.py", "json/decoder.py", "os.py", "random.py", "this.py"]
    assert [name for name in names if data.is_held_out(name)] == ["ast.py", "random.py"]


def test_tests_tables_and_installed_packages_are_left_out(tmp_path):
    for name in ("a.py", "b/c.py", "b/test/d.py", "site-packages/e.py", "encodings/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    assert [name for name, _ in data.source_files(tmp_path)] == ["a.py", "b/c.py"]


def test_a_library_without_source_files_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"found 0 bytes .* the demo needs 65536"):
        data.read(tmp_path)


def test_windows_are_pieces_of_the_text():
    _, corpus = library()
    text = corpus.content.tobytes()
    windows = [corpus.random_windows(np.random.default_rng(0), 5, 40), corpus.spread_windows(5, 40)]
    assert all(bytes(window.tolist()) in text for window in np.concatenate(windows))
    last = corpus.spread_windows(5, 40)[-1]
    assert bytes(last.tolist()) == text[-40:]


def test_prompts_end_with_what_was_asked_for():
    _, corpus = library()
    prompts = corpus.windows_before(b"\n    def ", 8, 64)
    assert len({bytes(prompt.tolist()) for prompt in prompts}) == 8
    assert all(bytes(prompt.tolist()).endswith(b"\n    def ") for prompt in prompts)
    with pytest.raises(ValueError, match="does not occur"):
        corpus.windows_before(b"no file of the library has this \0", 8, 64)


def test_the_unigram_loss_is_the_entropy_when_both_sides_are_alike():
    even = Corpus(np.tile(np.arange(4, dtype=np.uint8), 10_000), 1)
    assert data.unigram_loss(even, even) == pytest.approx(math.log(4), abs=0.01)


# --- model and training -----------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    trainer: Trainer
    history: History


def train_tiny(implementation: ImplementationName | None, steps: int = TINY.steps) -> Trained:
    devices = choose_devices()
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(devices.mesh):
        patch.setattr(train, "HELD_OUT_BYTES", 8 * TINY.batch * TINY.sequence)
        trainer = Trainer(dataclasses.replace(TINY, implementation=implementation, steps=steps), devices)
        return Trained(trainer, trainer.train(*library()))


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train_tiny(None)


@pytest.mark.slow
def test_a_later_byte_does_not_change_earlier_logits(trained):
    with jax.set_mesh(choose_devices().mesh):
        logits = jax.jit(lambda model, tokens: model(tokens)[0])
        tokens = library()[1].spread_windows(TINY.batch, TINY.sequence)
        before = np.asarray(logits(trained.trainer.model, tokens))
        changed = tokens.copy()
        changed[:, 10] = (changed[:, 10] + 1) % data.NUM_BYTES
        after = np.asarray(logits(trained.trainer.model, changed))
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    assert (np.abs(before - after)[:, 10:].max(-1) > 0).all()


def test_the_untrained_model_is_as_good_as_guessing(trained):
    (step, loss), *_ = trained.history.held_out_loss
    assert step == 0
    assert loss == pytest.approx(math.log(data.NUM_BYTES), abs=0.2)


def test_experts_lie_on_their_ranks_and_so_do_their_moments(trained):
    trainer = trained.trainer
    expert_parameters = trainer.model.blocks[0].moe.w_gate
    specs = {
        jax.tree_util.keystr(path): leaf.sharding.spec
        for path, leaf in jax.tree.leaves_with_path(trainer.state)
        if "w_gate" in jax.tree_util.keystr(path)
    }
    assert expert_parameters.shape[0] == TINY.experts
    assert len(specs) == 3 * TINY.layers  # parameters and two moments
    assert {spec[0] for spec in specs.values()} == {"expert"}


def test_the_history_has_every_row_of_every_step(trained):
    history = trained.history
    rows = np.stack(history.rows_per_expert)
    assert rows.shape == (TINY.steps, TINY.layers, TINY.experts)
    assert (rows.sum(-1) == TINY.batch * TINY.sequence * TINY.top_k).all()
    assert len(history.train_loss) == TINY.steps
    assert [step for step, _ in history.held_out_loss] == [0, 1, 2, 3]


@pytest.mark.slow
def test_through_the_megakernel_it_trains_to_the_same_losses(trained):
    found, expected = train_tiny("megakernel").history, trained.history
    np.testing.assert_array_equal(found.rows_per_expert, expected.rows_per_expert)
    # Measured: the same to the last bit of float32. AdamW makes of a gradient that is nothing but rounding a step as
    # long as any other, so this has room for a few of those.
    np.testing.assert_allclose(found.train_loss, expected.train_loss, rtol=1e-5)
    np.testing.assert_allclose(found.held_out_loss, expected.held_out_loss, rtol=1e-5)


@pytest.mark.slow
def test_with_experts_and_tokens_rounded_to_8_bits_it_trains_to_losses_within_a_percent(monkeypatch):
    wide = train_tiny(None, steps=40).history
    monkeypatch.setattr(model, "MoE", functools.partial(MoE, precision="fp8"))
    rounded = train_tiny(None, steps=40).history
    assert wide.held_out_loss[-1][1] < 0.75 * wide.held_out_loss[0][1]
    np.testing.assert_allclose(rounded.held_out_loss, wide.held_out_loss, rtol=0.01)
    assert rounded.held_out_loss != wide.held_out_loss


def test_parameters_are_counted_once_and_active_ones_by_top_k(trained):
    trainer = trained.trainer
    total, active = trainer.count_parameters()
    assert total == sum(leaf.size for leaf in jax.tree.leaves(trainer.state.parameters))
    idle_experts = TINY.experts - TINY.top_k
    assert total - active == TINY.layers * idle_experts * 3 * TINY.hidden * TINY.intermediate


def test_sampled_text_depends_on_the_seed_alone(trained):
    devices = choose_devices()
    with jax.set_mesh(devices.mesh):
        write = functools.partial(sample.sample, trained.trainer.model, devices=devices, held_out=library()[1], count=5)
        first, again, other = write(TINY), write(TINY), write(dataclasses.replace(TINY, seed=1))
    assert first == again != other
    assert all(prompt.endswith(sample.PROMPT_ENDING) and len(text) == 5 for prompt, text in first)


# --- comparison with the reference ------------------------------------------------------------------------------------


def compare_layers_of(model: LanguageModel) -> list[Comparison]:
    windows = library()[1].spread_windows(TINY.batch, TINY.sequence)
    return compare.compare(model, TINY, choose_devices(), windows)


@pytest.mark.slow
def test_the_layers_of_the_model_pass_the_comparison(trained):
    comparisons = compare_layers_of(trained.trainer.model)
    assert len(comparisons) == TINY.layers * len(compare.ARRAYS)
    assert all(comparison.passed for comparison in comparisons), report.comparison_table(comparisons)


@pytest.mark.slow
def test_a_layer_that_is_wrong_by_a_few_millionths_fails_the_comparison(trained, monkeypatch):
    correct: Callable[..., Any] = jaxmoe.moe_layer
    monkeypatch.setattr(jaxmoe, "moe_layer", lambda *args, **options: correct(*args, **options) * (1 + 5e-6))
    assert not any(comparison.passed for comparison in compare_layers_of(trained.trainer.model))


@pytest.mark.parametrize("error", [1.0, math.nan])
def test_the_verdict_is_negative_when_one_array_differs(error):
    history = History(held_out_loss=[(0, 5.5), (400, 1.5)])
    good, bad = Comparison(0, "output", 1e-7, 1e-7, 1e-6), Comparison(1, "output", error, 1e-7, 1e-6)
    assert run.verdict(Options(), history, [good])[0]
    passed, text = run.verdict(Options(), history, [good, bad])
    assert not passed
    assert "DIFFERS" in text
    assert "FAIL" in report.comparison_table([good, bad, good])


@pytest.mark.parametrize(
    ("options", "loss", "passes"),
    [
        (Options(), 2.1, True),
        (Options(), 2.3, False),
        (Options(), math.nan, False),
        (Options(seed=3, implementation="reference"), 2.3, False),
        (Options(steps=10_000), 2.3, False),
        (Options(steps=10), 5.4, True),
        (Options(steps=10), 5.6, False),
        (SHORT, 3.0, True),
        (Options(hidden=64), 2.3, True),
    ],
)
def test_the_promise_holds_for_the_default_sizes_and_others_need_only_learn(options, loss, passes):
    history = History(held_out_loss=[(0, 5.5), (options.steps, loss)])
    assert run.verdict(options, history, [])[0] is passes


# --- report -----------------------------------------------------------------------------------------------------------


def test_sampled_bytes_are_printed_without_control_characters():
    text = report.sample_text([(b"x = 1\n    def ", b"f(\x1b[31m\xff\t):\n        pass")])
    assert text.splitlines()[0].startswith("  |     def f(")
    assert "\x1b" not in text
    assert text.splitlines()[1] == "  |         pass"


def test_the_load_table_names_every_expert_and_its_imbalance():
    table = report.load_table(np.array([[10, 30], [20, 20]]))
    assert [line.split() for line in table.splitlines()[1:]] == [["0", "10", "30", "1.50"], ["1", "20", "20", "1.00"]]


def test_activations_in_bfloat16_leave_parameters_in_float32():
    devices = dataclasses.replace(choose_devices(), dtype=jnp.dtype(jnp.bfloat16))
    with jax.set_mesh(devices.mesh):
        model = nnx.eval_shape(lambda: LanguageModel(TINY, devices, rngs=nnx.Rngs(0)))
        inputs = jax.eval_shape(lambda model, tokens: model.moe_inputs(tokens), model, jnp.zeros((8, 16), jnp.int32))
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in inputs} == {jnp.dtype(jnp.bfloat16)}


# --- the program ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_help_lists_the_options_without_starting_jax():
    # JAX fails to start with a platform that does not exist.
    environment = os.environ | {"JAX_PLATFORMS": "nonexistent"}
    done = subprocess.run([*PROGRAM, "--help"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = [field.name for field in dataclasses.fields(Options)]
    assert [name for name in (*names, "output") if f"--{name}:" not in done.stdout] == []
    assert "--[no]short:" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--hidden=100", "must be a multiple of 32"),
        ("more", "options only"),
    ],
)
def test_a_bad_option_ends_with_one_line(argument, message):
    done = subprocess.run([*PROGRAM, argument], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_an_implementation_that_this_machine_does_not_have_ends_with_one_line():
    program = (
        "import runpy, sys; from jaxmoe import native; native.targets = lambda platform: (); "
        "sys.argv[1:] = ['--implementation=megakernel']; runpy.run_module('jaxmoe.demo', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "has no forward kernel for platform 'cpu' in this build" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_an_interrupt_while_compiling_ends_with_one_line_and_status_130(tmp_path):
    process = subprocess.Popen(
        # What a shell starts in the background, the tests for instance, has Ctrl-C ignored.
        ["env", "--default-signal=INT", *PROGRAM, "--short", f"--output={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    # From here on it compiles for several seconds.
    assert any(line.startswith("layer") for line in process.stdout)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "jaxmoe demo: stopped by Ctrl-C"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_short_demo_learns_equals_the_reference_and_draws_its_plots(tmp_path):
    output = tmp_path / "made" / "by the demo"
    # As many steps and layers as `--short` alone has are run by .ci/run.
    command = [*PROGRAM, "--short", "--layers=1", "--steps=30", f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict   passed" in done.stdout.splitlines()[-1]
    assert "moe_layer runs implementation='xla' on cpu, 4 ranks of expert" in done.stdout
    assert sorted(path.name for path in output.iterdir()) == ["expert_load.png", "loss.png"]
    for path in map(Path, output.iterdir()):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000
