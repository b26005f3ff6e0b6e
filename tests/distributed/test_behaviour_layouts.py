"""Every layout works the same divergences out over the updates of a rollout: those of the whole vocabulary."""

import pickle
from pathlib import Path

import pytest
import torch
import transformers

from gppo_megatron.config.architecture import hf_config_of_tiny
from gppo_megatron.config.schema import Parallel, TinyModel
from gppo_megatron.objective.divergences import generator_of
from tests.distributed.behaviour_layouts import COUNT, DIVERGENCE, ESTIMATES
from tests.distributed.layouts import TEMPERATURE
from tests.distributed.processes import run_group
from tests.distributed.reference import from_folder, trajectories_of

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("behaviour_layouts.py")
# A vocabulary of 21 is padded to 22 under tensor parallelism.
LAYOUTS = [
    [Parallel()],
    [
        Parallel(tensor=2),
        Parallel(tensor=2, sequence=True),
        Parallel(pipeline=2),
        Parallel(pipeline=2, virtual_stages=2),
        Parallel(context=2),
        Parallel(data=2),
    ],
    [Parallel(tensor=2, pipeline=2), Parallel(tensor=2, context=2)],
]


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = hf_config_of_tiny(TinyModel(tied=request.param == "tied", layers=4))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if "norm" in name else 3)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def log_probs(folder: Path, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [N, vocabulary] of all predictions with loss, and their labels."""
    model = from_folder(folder).double()
    model.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    rows, labels = [], []
    with torch.no_grad():
        for trajectory in trajectories_of(model.config.vocab_size):
            ids, trained = torch.from_numpy(trajectory.token_ids), torch.from_numpy(trajectory.trainable)[1:]
            rows.append(torch.log_softmax(model(ids[None]).logits[0] / TEMPERATURE, -1)[:-1][trained])
            labels.append(ids[1:][trained])
    return torch.cat(rows), torch.cat(labels)


def expected(estimator: str, log_pi: torch.Tensor, log_mu: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    atomic = generator_of(DIVERGENCE).atomic
    if estimator != "topk":
        return atomic(log_pi, log_mu).sum(1)
    keep = torch.zeros_like(log_mu, dtype=torch.bool)
    keep.scatter_(1, log_mu.topk(COUNT, dim=1).indices, True).scatter_(1, labels[:, None], True)
    rests = (values.masked_fill(keep, -torch.inf).logsumexp(1) for values in (log_pi, log_mu))
    return (atomic(log_pi, log_mu) * keep).sum(1) + atomic(*rests)


@pytest.mark.parametrize("layouts", LAYOUTS, ids=lambda layouts: f"{layouts[0].processes} processes")
def test_divergences_do_not_depend_on_the_layout(folder: Path, layouts: list[Parallel], tmp_path: Path) -> None:
    plan, output = tmp_path / "plan", tmp_path / "results"
    plan.write_bytes(pickle.dumps(layouts))
    run_group(SCRIPT, [str(folder), str(plan), str(output)], layouts[0].processes, timeout_seconds=600)
    results = torch.load(output)
    assert len(results) == len(ESTIMATES) * len(layouts)
    for case, updates in results.items():
        first, second = updates
        log_mu, labels = log_probs(folder, first["weights"])
        own_mu = log_mu.gather(1, labels[:, None]).squeeze(1)
        for update in updates:
            log_pi, _ = log_probs(folder, update["weights"])
            theirs = expected(case[1], log_pi, log_mu, labels)[own_mu.argsort()]
            anchor, _, divergence = update["seen"][:, update["seen"][0].argsort()]
            assert len(divergence) == len(theirs), case
            assert (anchor - own_mu.sort().values).abs().max() <= 1e-5, case
            known = ~divergence.isnan()
            assert known.any(), case
            assert known.all() == (case[1] != "atomic"), "a sample is less than all, and all else is known of all"
            assert (divergence - theirs)[known].abs().max() <= 1e-5 * max(1, theirs.max().item()), case
        assert theirs.max() > 0.02, "the first update must move the policy"
        assert case[1] == "atomic" or min(second["kept"]) < 0.9, "the trust region must mask here"
