"""Settings: precedence, refusals that name what is wrong, and declarations that hold together."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from expertserve.config import SETTINGS, Settings, resolve
from expertserve.cpus import physical_cores, usable_cpus
from expertserve.declare import COMMANDS, ENV_PREFIX
from expertserve.engine.request import SamplingParams
from expertserve.errors import ConfigError
from expertserve.values import ExpertBudget, parse_budget, parse_bytes, size_text

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return str(path)


def settings(**flags: object) -> Settings:
    return resolve({"model": "demo", **flags})


def refusal(**flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(**flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().chunk == 512
    config = toml(tmp_path, "chunk = 100")
    assert settings(config=config).chunk == 100
    monkeypatch.setenv("EXPERTSERVE_CHUNK", "200")
    assert settings(config=config).chunk == 200
    assert settings(config=config, chunk="300").chunk == 300


def test_file_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTSERVE_CONFIG", toml(tmp_path, "port = 99"))
    assert settings().port == 99


def test_model_may_come_from_any_source_but_must_come_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="EXPERTSERVE_MODEL"):
        resolve({})
    monkeypatch.setenv("EXPERTSERVE_MODEL", "x.gguf")
    assert resolve({}).model == "x.gguf"


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().port = 1  # type: ignore[misc]


def test_unknown_variable_is_refused_with_the_name_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTSERVE_THREDS", "3")
    message = refusal()
    assert "EXPERTSERVE_THREDS" in message and "did you mean EXPERTSERVE_THREADS" in message


def test_unknown_key_is_refused_with_file_and_the_name_that_was_meant(tmp_path: Path) -> None:
    config = toml(tmp_path, "kv_typ = 'f16'")
    message = refusal(config=config)
    assert config in message and "kv_typ is not a setting" in message and "did you mean kv_type" in message


def test_a_file_cannot_name_another_file(tmp_path: Path) -> None:
    assert "config is not a setting" in refusal(config=toml(tmp_path, "config = 'x.toml'"))


def test_bad_value_names_where_it_came_from_and_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(threads="two").startswith("--threads 'two': ")
    config = toml(tmp_path, "host = 3")
    assert refusal(config=config).startswith(f"{config}: host 3: ")
    monkeypatch.setenv("EXPERTSERVE_PORT", "70000")
    assert refusal().startswith("EXPERTSERVE_PORT '70000': ")


def test_bad_value_of_a_list_is_shown_as_it_was_given() -> None:
    with pytest.raises(ConfigError, match="--budgets '1,200': should be shares"):
        resolve({"model": "demo", "budgets": ["1,200"]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "gpu"),
        ("kv_type", "q4_0"),
        ("threads", "-1"),
        ("ctx", "0"),
        ("chunk", "0"),
        ("flash_attn", "maybe"),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("top_p", "0"),
        ("seed", "-1"),
        ("stats_every", "-1"),
        ("expert_cache", "lots"),
        ("expert_cache", "101%"),
        ("max_body", "1 parsec"),
        ("chat_template", "/nonexistent/template.jinja"),
        ("chat_template", "{{ messages }}" * 500),
        ("stats_json", "/nonexistent/stats.json"),
        ("config", "/nonexistent/settings.toml"),
        ("cors_origin", "chat.example"),
        ("cors_origin", "https://chat.example/page"),
        ("cors_origin", "https://*.example"),
        ("cors_origin", "['https://a.example"),
        ("model", ""),
    ],
)
def test_value_that_cannot_be_used_is_refused_before_start(name: str, value: str) -> None:
    assert SETTINGS[name].flag in refusal(**{name: value}) or name == "model"


def test_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    assert "no TOML" in refusal(config=toml(tmp_path, "port: 8080"))


def test_api_key_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTSERVE_API_KEY", "first-key,second-key")
    resolved = settings()
    assert resolved.api_key == ("first-key", "second-key")
    assert "first-key" not in repr(resolved)
    monkeypatch.setenv("EXPERTSERVE_API_KEY", '["first-key", 3]')
    assert "first-key" not in refusal()


def test_list_comes_from_words_json_or_repeated_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(stop=["a", "b,c"]).stop == ("a", "b,c")
    monkeypatch.setenv("EXPERTSERVE_STOP", '["x,y"]')
    assert settings().stop == ("x,y",)


def test_origins_are_written_as_browsers_send_them() -> None:
    given = ["HTTPS://Chat.Example:443/", "http://localhost:3000", "app://obsidian.md", "http://[::1]:80", "*", "null"]
    wanted = ("https://chat.example", "http://localhost:3000", "app://obsidian.md", "http://[::1]", "*", "null")
    assert settings(cors_origin=given).cors_origin == wanted
    assert settings(cors_origin="https://a.example, https://b.example").cors_origin[1] == "https://b.example"


def test_setting_without_effect_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().inert("run") == []
    monkeypatch.setenv("EXPERTSERVE_PORT", "99")
    [line] = settings(temperature="0").inert("run")
    assert line.startswith("EXPERTSERVE_PORT has no effect") and "`run`" in line
    assert settings().inert("serve") == []
    lines = settings(temperature="0", seed="3", repeat_last_n="5").inert("run")
    assert [line.split()[0] for line in lines] == ["--repeat-last-n", "--seed", "EXPERTSERVE_PORT"]


def test_more_threads_than_cpus_are_obeyed_and_said_where_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertserve.config.usable_cpus", lambda: 3)
    many = settings(threads="4", device="cpu")
    line = many.crowded()
    assert many.threads == 4 and line is not None and line.startswith("--threads 4 is more than the 3 CPUs")
    assert settings(threads="3", device="cpu").crowded() is settings(device="cpu").crowded() is None
    assert settings(threads="4", device="cuda").crowded() is settings(threads="4", device="reference").crowded() is None
    [inert] = settings(threads="4", device="reference").inert("run")
    assert inert == "--threads has no effect: the reference computes with NumPy"


def test_defaults_pass_their_own_checks() -> None:
    for setting in SETTINGS.values():
        if setting.default in (None, "", ()):
            continue
        given = str(setting.default).lower() if isinstance(setting.default, bool) else str(setting.default)
        given = ",".join(map(str, setting.default)) if isinstance(setting.default, tuple) else given
        wanted = getattr(settings(), setting.name)
        assert getattr(settings(**{setting.name: given}), setting.name) == wanted, setting.name


def test_sampling_defaults_are_those_of_a_request() -> None:
    for field in dataclasses.fields(SamplingParams):
        if field.name in SETTINGS:
            assert SETTINGS[field.name].default == field.default, field.name


def test_every_setting_has_a_reason_of_one_sentence_and_a_command() -> None:
    for setting in SETTINGS.values():
        reason = setting.declared.reason
        assert reason.endswith(".") and ". " not in reason and reason[0].isupper(), setting.name
        assert setting.declared.commands and set(setting.declared.commands) <= {*COMMANDS, "bench --serve"}, (
            setting.name
        )


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_example_file_is_valid(path: Path) -> None:
    resolved = settings(config=str(path))
    assert len(resolved.origin) > 3


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("8GiB", 8 << 30), ("8g", 8 << 30), ("1.5 KiB", 1536), ("2GB", 2 * 10**9), ("3B", 3)],
)
def test_size_has_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (-(5 << 19), "-2.5 MiB"),
        (4096, "4096 bytes"),
        (300 << 10, "0.3 MiB"),
        (1000 << 20, "1000.0 MiB"),
        (3 << 29, "1.50 GiB"),
    ],
)
def test_size_is_shown_in_the_unit_that_people_read(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("auto", ExpertBudget("auto")),
        ("8GiB", ExpertBudget("bytes", 8 << 30)),
        ("4000", ExpertBudget("slots", 4000)),
        ("12.5%", ExpertBudget("percent", 12.5)),
    ],
)
def test_expert_budget_has_four_forms(text: str, budget: ExpertBudget) -> None:
    assert parse_budget(text) == budget
    assert parse_budget(str(budget)) == budget


class Machine:
    """A sysfs of `siblings` (one entry a CPU) and a control group; the affinity mask holds every CPU."""

    def __init__(self, tmp_path: Path, siblings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_dir, self.cgroup_root, self.proc_cgroup = tmp_path / "cpu", tmp_path / "cgroup", tmp_path / "proc"
        for cpu, listed in enumerate(siblings):
            folder = self.cpu_dir / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(listed + "\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(len(siblings))), raising=False)
        self.proc_cgroup.write_text("")

    def limit(self, line: str, files: dict[str, str]) -> None:
        self.proc_cgroup.write_text(line + "\n")
        for name, text in files.items():
            path = self.cgroup_root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    def cpus(self) -> int:
        return usable_cpus(proc_cgroup=self.proc_cgroup, cgroup_root=self.cgroup_root)

    def cores(self) -> int:
        return physical_cores(cpu_dir=self.cpu_dir, proc_cgroup=self.proc_cgroup, cgroup_root=self.cgroup_root)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, ["0,4", "1,5", "2,6", "3,7"] * 2, monkeypatch)


def test_hyperthread_siblings_count_once(machine: Machine) -> None:
    assert (machine.cores(), machine.cpus()) == (4, 8)


def test_quota_of_the_tightest_group_limits_threads(machine: Machine) -> None:
    machine.limit("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"})
    assert (machine.cores(), machine.cpus()) == (2, 3)


def test_quota_of_a_version_1_group_limits_threads(machine: Machine) -> None:
    files = {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}
    machine.limit("3:cpu,cpuacct:/a", files)
    assert machine.cores() == 3


def test_part_of_a_core_is_one_thread(machine: Machine) -> None:
    machine.limit("0::/a", {"a/cpu.max": "50000 100000"})
    assert machine.cores() == machine.cpus() == 1


def test_machine_that_says_nothing_has_a_core_for_each_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    nowhere = tmp_path / "nothing"
    assert physical_cores(cpu_dir=nowhere, proc_cgroup=nowhere, cgroup_root=nowhere) == 3
