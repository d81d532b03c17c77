"""The files of launch/, without a cluster: each fits the schema of its launcher, and starts a command that exists."""

import json
import pathlib
import re
import shlex
import string
import subprocess
import sys
import sysconfig

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from mod_jax import errors

ROOT = pathlib.Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = ("xpk.sh", "queued.sh", "startup.sh", "slurm.sbatch")
FILES = (*SCRIPTS, "jobset.yaml", "sky.yaml")
VALUES = dict(NAME="mod-1b", IMAGE="image", BUCKET="pod", WORKDIR="/shared/mod-1b", name="mod-1b", bucket="pod")
SINGLE_SLICE_HOSTS = {"4x4": 4}
HOPELESS = {code for code, what in errors.RESTARTS.items() if what.startswith("**never**")}
ALWAYS = {code for code, what in errors.RESTARTS.items() if what.startswith("**always**")} | {errors.PREEMPTED}


def text_of(name):
    return (LAUNCH / name).read_text()


# Kubernetes.


def job_set(text):
    """The JobSet of a file, validated: by its own model, and its pods by the schema of Kubernetes."""
    given = yaml.safe_load(string.Template(text).substitute(VALUES))
    understood = models.JobsetV1alpha2JobSet.from_dict(given)
    kept = json.loads(understood.to_json())
    assert kept == given, "a key that JobSet does not know"
    for job in given["spec"]["replicatedJobs"]:
        template = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(template, "1.32", strict=True)
    return given


def test_the_job_set_is_one_that_kubernetes_takes():
    given = job_set(text_of("jobset.yaml"))
    (job,) = given["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    hosts = SINGLE_SLICE_HOSTS[spec["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]]
    assert spec["completions"] == spec["parallelism"] == hosts
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert set(rule["onExitCodes"]["values"]) == HOPELESS
    assert rule["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("maxRestarts: 100", "maxRestart: 100"),
        ("maxRestarts: 100", "maxRestarts: many"),
        ("completions: 4", "completion: 4"),
        ("restartPolicy: Never", "restartPolicy: {}"),
        ("terminationGracePeriodSeconds: 120", "terminationGracePeriod: 120"),
        ("replicatedJobs:", "replicatedJob:"),
        ("onJobFailureReasons:", "onJobFailureReason:"),
        ("action: FailJob  #", "action: [FailJob]  #"),
    ],
)
def test_a_mistake_in_the_job_set_is_found(right, wrong):
    text = text_of("jobset.yaml")
    assert text.count(right) >= 1
    with pytest.raises(Exception, match=r".+"):
        job_set(text.replace(right, wrong))


# Shell.


SHELLCHECK = pathlib.Path(sysconfig.get_path("scripts"), "shellcheck")  # the environment need not be on PATH


def shellcheck(text):
    return subprocess.run([SHELLCHECK, "-s", "bash", "-"], input=text, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_sound_and_can_be_run(name):
    checked = shellcheck(text_of(name))
    assert checked.returncode == 0, checked.stdout
    assert (LAUNCH / name).stat().st_mode & 0o111


def test_a_mistake_in_a_script_is_found():
    assert shellcheck(text_of("slurm.sbatch").replace('"$SLURM_JOB_ID"', "$SLURM_JOB_ID")).returncode == 1
    assert shellcheck(text_of("queued.sh").replace("esac", "fi")).returncode == 1


def test_the_shell_in_sky_yaml_is_sound():
    task = yaml.safe_load(text_of("sky.yaml"))
    assert task.keys() <= {"name", "workdir", "resources", "envs", "setup", "run"}
    for part in ("setup", "run"):
        assert shellcheck(task[part]).returncode == 0, part
    recovery = task["resources"]["job_recovery"]
    assert set(recovery["recover_on_exit_codes"]) == ALWAYS


def test_the_other_launchers_restart_what_should_be():
    codes = set(map(int, re.search(r"--restart-on-exit-codes=([\d,]+)", text_of("xpk.sh"))[1].split(",")))
    assert codes | {42} >= ALWAYS  # which xpk adds
    assert not codes & HOPELESS
    codes = set(map(int, re.search(r"^ +([\d |]+)\)$", text_of("slurm.sbatch"), re.MULTILINE)[1].split("|")))
    assert codes >= ALWAYS
    assert not codes & HOPELESS
    codes = set(map(int, re.search(r"RestartPreventExitStatus='([\d ]+)'", text_of("startup.sh"))[1].split()))
    assert codes == HOPELESS


# The command that each of them starts.


def train_command(name, text):
    """The arguments of mod_jax.train in a file of launch/, with its variables filled in."""
    if name == "jobset.yaml":
        container = job_set(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
        words = container["command"]
    else:
        text = yaml.safe_load(text)["run"] if name == "sky.yaml" else text
        (found,) = re.findall(r"python -m mod_jax\.train((?:[^\n]*\\\n)*[^\n]*)", text)
        found = found.split('" \\\n')[0] if name == "xpk.sh" else found
        words = shlex.split(string.Template(found.replace("\\\n", " ")).substitute(VALUES))
    return [word for word in words if word.startswith("--")]


PARSE = """
import sys
import sysconfig
from absl import flags
from mod_jax import cli, paths, train
flags.FLAGS(sys.argv)
config = cli.read_config(train.CONFIG.value)
paths.run_folder("--workdir", train.WORKDIR.value)
print(train.PREEMPTED_EXIT_CODE.value, train.DISTRIBUTED["enabled"].value, train.WORKDIR.value)
"""


def parsed(arguments):
    command = [sys.executable, "-c", PARSE, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("name", [name for name in FILES if name != "queued.sh"])
def test_the_command_is_one_that_train_takes(name):
    answer = parsed(train_command(name, text_of(name)))
    assert answer.returncode == 0, answer.stderr
    workdir = "/shared/mod-1b" if name == "slurm.sbatch" else "gs://pod/mod-1b"
    assert answer.stdout.split() == ["42", "True", workdir]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("--preempted_exit_code=42", "--preemption_exit_code=42"),
        ("size=1b", "size=2b"),
        ("gs://$BUCKET/$NAME", "s3://$BUCKET/$NAME"),
    ],
)
def test_a_mistake_in_a_command_is_found(right, wrong):
    assert parsed(train_command("xpk.sh", text_of("xpk.sh").replace(right, wrong))).returncode != 0


@pytest.mark.parametrize("name", [name for name in FILES if name != "startup.sh"])
def test_the_documented_command_is_that_of_the_file(name):
    """What the table of docs/pods.md says stands at the top of the file too, but for line ends and placeholders."""
    page = (ROOT / "docs" / "pods.md").read_text()
    (row,) = [line for line in page.splitlines() if f"(../launch/{name})" in line]
    command = row.split("`")[3].replace("\\|", "|")
    documented = [line.removeprefix("#").strip() for line in text_of(name).splitlines() if line.startswith("#   ")]
    assert re.sub(r"https://\S+", "URL", command) in re.sub(r"https://\S+", "URL", " ".join(documented))
