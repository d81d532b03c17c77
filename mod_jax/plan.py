"""Does it fit? python -m mod_jax.plan --config=configs/paper.py:size=3b --topology=v5e:16x16

Compiles the real train step, or with --program=decode the real decoding loop and with --program=prefill the pass over
the prompts, for a TPU slice that need not be there (pip install -e '.[tpu]'; no TPU, no corpus), and prints size,
memory against what a chip has, FLOPs, what moves, and an estimate of the time. The same program is compiled once: its
result is kept below the cache folder (data.cache_dir or MOD_JAX_CACHE). --search compiles other meshes, recomputation,
micro-batches and chunks of the loss too, and ranks them.

The last line says whether it fits; the exit code is 0 either way.
"""

import os

from absl import app, flags

from mod_jax import cli, host
from mod_jax.errors import ConfigError
from mod_jax.outputs import to_json

TOPOLOGY = flags.DEFINE_string("topology", None, "The TPU slice: v5e:16x16, or v5e-256; --list shows all.")
PROGRAM = flags.DEFINE_enum(
    "program", "train", ["train", "decode", "prefill"], "What to plan: a train step, a token of sampling, its prompts."
)
BATCH = flags.DEFINE_integer("batch", None, "With decode and prefill: rows sampled together; default 8.")
CONTEXT = flags.DEFINE_integer("context", None, "With decode and prefill: positions of a row; default: model.context.")
PROMPT = flags.DEFINE_integer("prompt", None, "With prefill: tokens of the longest prompt; default: the context.")
MESH = cli.define_mesh()
SEARCH = flags.DEFINE_bool("search", False, "Compare ways to train: mesh, remat, accumulation, loss chunk.")
SEARCH_LIMIT = flags.DEFINE_integer("search_limit", None, "With --search: how many to compile, the default too; 12.")
LIST = flags.DEFINE_bool("list", False, "Show the slices that can be planned for, and exit.")
JSON = flags.DEFINE_bool("json", False, "Print the report as one JSON object.")
CONFIG = cli.define_config()
flags.adopt_module_key_flags(cli)  # so that --help shows them


def main(argv: list[str]) -> int:
    cli.refuse_arguments(argv)

    def run() -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # planning takes no accelerator, not even where there is one

        from mod_jax.planning import topology

        host.load_no_programs()  # JAX cannot read back what it writes for a topology
        if LIST.value:
            print(topology.list_products())
            return
        config = cli.read_config(CONFIG.value)
        if TOPOLOGY.value is None:
            raise ConfigError("--topology is missing; for example --topology=v5e:4x4, and --list shows all")
        if PROMPT.present and PROGRAM.value != "prefill":
            raise ConfigError("--prompt needs --program=prefill")
        if SEARCH_LIMIT.present and not SEARCH.value:
            raise ConfigError("--search_limit needs --search")
        if SEARCH.value and PROGRAM.value != "train":
            raise ConfigError(f"--search compares ways to train, and does not go with --program={PROGRAM.value}")
        if PROGRAM.value == "train":
            from mod_jax.planning import search
            from mod_jax.planning import train_step as plan

            keys = [(BATCH, "train.batch_size"), (CONTEXT, "data.seq_len")]
            for flag, key in [*keys, *((flag, f"mesh.{axis}") for axis, flag in MESH.items())]:
                if flag.present:
                    raise ConfigError(f"--{flag.name} needs --program=decode; a train step has --config.{key}")
            if SEARCH.value:
                plan = search
                limit = SEARCH_LIMIT.value if SEARCH_LIMIT.present else search.LIMIT
                report = search.make_report(config, TOPOLOGY.value, limit)
            else:
                report = plan.make_report(config, TOPOLOGY.value)
        else:
            mesh = cli.mesh_of(MESH) if any(flag.present for flag in MESH.values()) else None
            sizes = [8 if BATCH.value is None else BATCH.value, CONTEXT.value]
            if PROGRAM.value == "decode":
                from mod_jax.planning import decode as plan
            else:
                from mod_jax.planning import prefill as plan

                sizes.append(PROMPT.value)
            report = plan.make_report(config, TOPOLOGY.value, *sizes, mesh=mesh)
        print(to_json(report, indent=2) if JSON.value else plan.describe(report), flush=True)

    return cli.exit_code(run)


if __name__ == "__main__":
    app.run(main, flags_parser=cli.parse_flags)
