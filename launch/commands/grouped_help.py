"""`--help` with options under headings, in plain text: rich's tables cut long option names on 80 columns."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """An option's heading is its `rich_help_panel`; arguments, and options without one, come first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each heading, in the order of their first options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or plain
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
