"""The planner: sizes of models, memory, traffic, times, the choice, and the command."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from haiscale.__main__ import main as haiscale
from haiscale.model.hardware import FIRE_FLYER_2
from haiscale.placement import Nodes, Sizes, place
from haiscale.plan import MODELS, Model, ModelError, plan
from haiscale.plan.__main__ import EXAMPLES, main
from haiscale.plan.layouts import Candidate, Precision, Schedule
from haiscale.plan.memory import memory
from haiscale.plan.search import Options, plan_of
from haiscale.plan.timing import simulated_pipeline, timing
from haiscale.plan.traffic import expert_bytes, traffic

PAGE = Path(__file__).parents[4] / "docs/guides/choose-a-layout.md"
LLAMA, MOE = MODELS["llama-13b"], MODELS["deepseekmoe-16b"]


def nodes(count, zones=1, ranks=8):
    names = tuple(f"n{n}" for n in range(count))
    return Nodes(names, tuple("AB"[n * zones // count] for n in range(count)), ranks)


def candidate(model, where, *, hardware=FIRE_FLYER_2, schedule=Schedule.ONE_F_ONE_B, **sizes):
    layout = place(where, Sizes(**sizes))
    return Candidate(model, layout, hardware, 1, schedule, False, Precision(), 0.36)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-medium", 0.355e9),
        ("llama-7b", 6.74e9),
        ("llama-13b", 13.02e9),
        ("deepseekmoe-16b", 16.4e9),
    ],
)
def test_named_models_have_their_published_size(name, parameters):
    assert MODELS[name].parameters == pytest.approx(parameters, rel=0.01)
    assert MODELS[name].active_parameters <= MODELS[name].parameters


def test_memory_of_a_stage():
    """LLaMa-13B on 8 stages, computed by hand."""
    one = candidate(LLAMA, nodes(8), dp=8, pp=8)
    needed = memory(one)
    layer = 4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120
    stage = 5 * layer + 32000 * 5120
    assert needed.parameters == needed.gradients == pytest.approx(2 * stage, rel=1e-3)
    assert needed.optimizer == pytest.approx(12 * stage, rel=1e-3)
    token = 2 * (8 * 5120 + 3 * 13824)
    assert needed.activations == pytest.approx(token * 2048 * 5 * 8)
    again = memory(replace(one, recompute=True))
    assert again.activations < needed.activations / 8
    eager = memory(replace(one, schedule=Schedule.EAGER))
    assert eager.activations == pytest.approx(needed.activations * 15 / 8)


def test_memory_of_shards():
    whole, sharded = (
        memory(candidate(LLAMA, nodes(1), dp=8 // shard, shard=shard)) for shard in (1, 8)
    )
    assert sharded.optimizer == pytest.approx(whole.optimizer / 8)
    layers = 2 / 40 * 7 / 8  # two layers are gathered
    assert sharded.parameters == pytest.approx(whole.parameters * (1 / 8 + layers))
    staged = memory(candidate(LLAMA, nodes(8), shard=8, pp=8))
    plain = memory(candidate(LLAMA, nodes(8), dp=8, pp=8))
    assert staged.parameters == plain.parameters  # gathered for the whole step
    assert staged.optimizer == pytest.approx(plain.optimizer / 8)


def test_traffic_of_the_papers_layouts():
    """A stage of 13B parameters per node, bf16: 86 GB of activations on 8 nodes, 10.7 on 64."""
    few = traffic(candidate(LLAMA, nodes(8), dp=8, pp=8))
    assert few.card_pipeline == pytest.approx(86e9, rel=0.01)
    assert few.card_gradients == 0  # summed inside the node
    many = traffic(candidate(LLAMA, nodes(64), dp=64, pp=8))
    assert many.card_pipeline == pytest.approx(10.7e9, rel=0.01)
    assert many.card_gradients == pytest.approx(2 * 13e9 * 2 / 8, rel=0.1)
    flat = traffic(candidate(LLAMA, nodes(8), dp=64))
    assert flat.card_gradients == pytest.approx(52e9, rel=0.01)
    assert flat.card_pipeline == flat.zones == 0


def test_traffic_inside_a_node():
    """Each rank copies its gradients to memory and the sums back; shards are received by each."""
    whole = traffic(candidate(LLAMA, nodes(8), dp=8, pp=8)).node
    stage = 2 * (LLAMA.dense_parameters / 8 + LLAMA.embedding)
    assert whole == pytest.approx(8 * 2 * stage)
    halves = traffic(candidate(LLAMA, nodes(8), dp=4, pp=8, tp=2))
    assert halves.node == pytest.approx(whole / 2)
    assert halves.nvlink == pytest.approx(4 * 5 * 512 * 2048 * 5120 * 2)
    shards = traffic(candidate(LLAMA, nodes(8), shard=8, pp=8)).node
    assert shards == pytest.approx(8 * 2 * stage * 7 / 8)  # gathered once, scattered once
    alone = traffic(candidate(LLAMA, nodes(1), shard=8))
    assert alone.card == 0
    assert alone.node == pytest.approx(8 * 3 * 256 * 2 * LLAMA.parameters * 7 / 8)


def test_traffic_between_zones():
    two = traffic(candidate(LLAMA, nodes(16, 2), dp=16, pp=8))
    assert two.zones == pytest.approx(2 * LLAMA.parameters, rel=0.1)  # each stage's sum, once
    sharded = traffic(candidate(LLAMA, nodes(16, 2), dp=2, shard=4, pp=8, tp=2))
    assert sharded.zones == pytest.approx(two.zones)
    # One chain has its border inside.
    chain = traffic(candidate(LLAMA, nodes(2, 2), dp=8, pp=2))
    activations = 8 * 2048 // 8 * 2048 * 5120 * 2
    assert chain.zones - activations == pytest.approx(2 * LLAMA.parameters, rel=0.1)


@pytest.mark.parametrize(("count", "copies"), [(1, 0.0), (2, 0.99), (4, 2.51), (8, 3.97)])
def test_a_token_is_sent_once_to_each_node_that_it_visits(count, copies):
    one = candidate(MOE, nodes(count), dp=8 * count, ep=8 * count, ep_nodes=count)
    inside, outside = expert_bytes(one)
    tokens = 4 * MOE.expert_layers * one.microbatches * one.tokens * MOE.width * 2
    assert outside / tokens == pytest.approx(copies, abs=0.005)
    assert inside / tokens == pytest.approx(6 / count * 7 / 8)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("rate", [25e9, 5e9, 2e9])
def test_the_formula_of_pipelines_agrees_with_the_event_model(schedule, rate):
    hardware = replace(FIRE_FLYER_2, card_rate=rate)
    for pp, batch in ((8, 2048), (4, 128)):
        model = replace(LLAMA, batch=batch)
        one = candidate(model, nodes(8), hardware=hardware, schedule=schedule, dp=64 // pp, pp=pp)
        parts = timing(one)
        formula = parts.computation + parts.bubble + parts.hops
        assert formula == pytest.approx(simulated_pipeline(one), rel=0.05)


def test_the_step_of_figure_9_is_predicted():
    """With the efficiency of that figure, within 10 %: attention is counted here, not there."""
    assert timing(candidate(LLAMA, nodes(8), dp=8, pp=8)).total == pytest.approx(64.118, rel=0.1)
    assert timing(candidate(LLAMA, nodes(64), dp=64, pp=8)).total == pytest.approx(9.717, rel=0.1)


def test_all_layouts_have_a_place_and_a_reason():
    result = plan(LLAMA, nodes(8), Options(), best=3)
    times = [choice.seconds for choice in result.best]
    times += [loss.seconds for loss in result.losses if loss.reason == "slower"]
    assert [round(time, 6) for time in times] == sorted(round(time, 6) for time in times)
    assert len(result.best) == 3
    for choice in result.best:
        assert choice.memory.total <= result.options.memory_limit
        assert choice.candidate.microbatches >= choice.candidate.sizes.pp
    reasons = {loss.reason for loss in result.losses}
    assert reasons == {"slower", "memory", "tp-in-nvlink", "stage-per-node"}
    assert all("slower by" in loss.text for loss in result.losses if loss.seconds is not None)


@pytest.mark.parametrize(
    ("sizes", "reason", "text"),
    [
        ({"dp": 64}, "memory", "mostly optimizer"),
        ({"dp": 16, "tp": 4}, "tp-in-nvlink", "NVLink joins 2"),
        ({"dp": 8, "pp": 4}, "sizes-fill-the-world", "set dp to 16"),
        ({"dp": 1, "pp": 64}, "layers", "the model has 40 layers"),
        ({"dp": 64, "ep": 2}, "experts", "does not divide 0 experts"),
    ],
)
def test_one_layout_and_why_it_does_not_run(sizes, reason, text):
    [loss] = plan_of(LLAMA, nodes(8), Options(), Sizes(**sizes)).losses
    assert loss.reason == reason
    assert text in loss.text


def test_a_batch_that_does_not_divide_is_a_reason():
    small = replace(LLAMA, batch=24)
    [loss] = plan_of(small, nodes(8), Options(), Sizes(dp=16, pp=4)).losses
    assert loss.text.startswith("the batch of 24 sequences does not divide over 16 replicas")
    [loss] = plan_of(replace(small, batch=16), nodes(8), Options(), Sizes(dp=16, pp=4)).losses
    assert loss.text.startswith("1 sequences for each replica are fewer than the 4 stages")


def test_examples_of_the_help_run(capsys):
    commands = re.findall(r"^  haiscale (plan .*?)(?:  +#.*)?$", EXAMPLES, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        arguments = shlex.split(command)
        if "topology.json" in arguments or "my-model.json" in arguments:
            continue  # with files: below
        assert haiscale(arguments) == 0, command
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 140


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


SMALL = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 1000, "batch": 64, "context": 128}


def test_a_model_and_a_topology_from_files(tmp_path, capsys):
    topology = write(
        tmp_path / "topology.json",
        {
            "version": 1,
            "ranks_per_node": 2,
            "nodes": [{"name": "a0", "zone": "A"}, {"name": "b0", "zone": "B"}],
        },
    )
    model = write(tmp_path / "small.json", SMALL)
    assert main([model, "--topology", topology, "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["nodes"]["names"] == ["a0", "b0"]
    assert result["model"]["name"] == "small"
    best = result["best"][0]
    parts = {name: value for name, value in best["seconds"].items() if value is not None}
    total = parts.pop("total")
    parts.pop("simulated", None)
    assert total == pytest.approx(sum(parts.values()))
    yaml = write(tmp_path / "small.yaml", "\n".join(f"{k}: {v}" for k, v in SMALL.items()))
    assert main([yaml, "--topology", topology]) == 0
    assert capsys.readouterr().out.startswith("small: ")


def test_exit_statuses_and_messages(tmp_path, capsys):
    assert main(["llama-13b", "--nodes", "1", "--memory", "8"]) == 1
    assert "no layout fits" in capsys.readouterr().out
    broken = write(tmp_path / "broken.json", "{")
    lists = write(tmp_path / "list.json", [])
    unknown = write(tmp_path / "unknown.json", SMALL | {"layer": 3})
    heads = write(tmp_path / "heads.json", SMALL | {"heads": 3})
    topology = write(tmp_path / "topology.json", {"version": 1})
    for arguments, message in (
        (["gpt5", "--nodes", "1"], "unknown model 'gpt5': expected gpt2-medium"),
        ([broken, "--nodes", "1"], "invalid JSON"),
        ([lists, "--nodes", "1"], "expected one object"),
        ([unknown, "--nodes", "1"], "unknown field 'layer': did you mean layers?"),
        ([heads, "--nodes", "1"], "they do not divide the width 256"),
        (["llama-7b", "--topology", topology], "topology.json"),
        (["llama-7b", "--topology", str(tmp_path / "none")], "none"),
        (["llama-7b", "--nodes", "3", "--zones", "2"], "--zones 2 does not divide --nodes 3"),
        (["llama-7b", "--nodes", "1", "--layout", "dp=x"], "invalid --layout 'dp=x'"),
        (["llama-7b", "--nodes", "1", "--layout", "dp=1,dp=2"], "invalid --layout"),
        (["llama-7b", "--nodes", "1", "--layout", "dp=0"], "invalid dp 0"),
        (["llama-7b", "--nodes", "1251"], "are 10008 ranks: the planner compares"),
    ):
        assert main(arguments) == 2, arguments
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        haiscale(["plan", "--help"])
    assert "exit status: 0 a layout fits" in capsys.readouterr().out
    for invalid in (["--nodes", "0"], ["--nodes", "1", "--efficiency", "2"], []):
        with pytest.raises(SystemExit, match="2"):
            main(["llama-7b", *invalid])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": True}, "layers"),
        ({"batch": 1.5}, "batch"),
        ({"width": 10**10}, "width"),
        ({"gated": 1}, "gated"),
        ({"name": 3}, "name"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token"),
        ({"dense_layers": 5}, "dense_layers"),
        ({"vocabulary": None}, "vocabulary"),
    ],
)
def test_invalid_fields_are_named(change, field):
    with pytest.raises(ModelError) as raised:
        Model.of(SMALL | change, "small")
    assert raised.value.field == field
    assert field in str(raised.value)
    with pytest.raises(ModelError, match="missing field 'layers'"):
        Model.of({}, "empty")


def test_extreme_sizes_take_no_longer(capsys, tmp_path):
    """Nothing is repeated for each layer, expert or sequence."""
    huge = dict.fromkeys(SMALL, 10**9) | {"experts": 10**9, "experts_per_token": 10**8}
    model = write(tmp_path / "huge.json", huge)
    assert main([model, "--nodes", "2", "--ep-nodes", "2"]) == 1
    endless = SMALL | {"batch": 10**9, "layers": 10**9, "width": 4, "vocabulary": 1}
    model = write(tmp_path / "endless.json", endless)
    assert main([model, "--nodes", "2", "--memory", "1e12"]) == 0
    assert "best:" in capsys.readouterr().out


def test_the_command_of_the_guide_prints_what_the_guide_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    command, shown = re.search(
        r"test_plan.py -->\n```sh\n(.*?)```\n.*?```text\n(.*?)```", PAGE.read_text(), re.DOTALL
    ).groups()
    assert haiscale(shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for line in shown.splitlines():
        assert line.rstrip() in printed or line == "…"
