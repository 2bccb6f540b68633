"""A Flower app written into a folder, for measurements and tests of apps that are not ours."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

__all__ = ["write_app"]


def write_app(
    folder: Path,
    name: str,
    modules: Mapping[str, str],
    *,
    server: str = "apps:server_app",
    client: str = "apps:client_app",
    config: str = "",
) -> Path:
    """Write an app of one package and return its folder.

    Parameters
    ----------
    folder : Path
        Is made.
    name : str
        Of the project and of its package.
    modules : Mapping[str, str]
        Source of the package's modules by name.
    server, client : str
        Module and name of the ServerApp and of the ClientApp.
    config : str
        Lines of the run config, as TOML.
    """
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module, source in modules.items():
        (package / f"{module}.py").write_text(textwrap.dedent(source))
    (folder / "pyproject.toml").write_text(
        textwrap.dedent(
            f"""
            [project]
            name = "{name}"
            version = "0.0.1"
            dependencies = []

            [tool.flwr.app]
            publisher = "somebody"

            [tool.flwr.app.components]
            serverapp = "{name}.{server}"
            clientapp = "{name}.{client}"

            [tool.flwr.app.config]
            """
        )
        + textwrap.dedent(config)
    )
    return folder
