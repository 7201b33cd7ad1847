"""What a PromQL query would find among samples scraped once."""

import re
from collections.abc import Collection

import promql_parser as promql
from prometheus_client.samples import Sample

RANGE = re.compile(r"\$__\w+")  # Grafana's own variables for durations


def finds(query: str, samples: Collection[Sample], **variables: str) -> bool:
    """Whether it returns data; Grafana's variables are filled in. Raises ValueError if it is no PromQL."""
    for name, value in variables.items():
        query = query.replace(f"${name}", value)
    return _finds(promql.parse(RANGE.sub("5m", query)), samples)


def _finds(expression: object, samples: Collection[Sample]) -> bool:
    match expression:
        case promql.NumberLiteral():
            return True
        case promql.VectorSelector():
            matchers = expression.matchers.matchers
            return any(
                sample.name == expression.name and all(_matches(matcher, sample) for matcher in matchers)
                for sample in samples
            )
        case promql.MatrixSelector():
            return _finds(expression.vector_selector, samples)
        case promql.ParenExpr() | promql.AggregateExpr():
            return _finds(expression.expr, samples)
        case promql.Call():
            return all(_finds(argument, samples) for argument in expression.args)
        case promql.BinaryExpr():
            sides = [_finds(side, samples) for side in (expression.lhs, expression.rhs)]
            return any(sides) if str(expression.op) == "or" else all(sides)
    raise ValueError(f"{type(expression).__name__} is more than this reads: {expression}")


def _matches(matcher: promql.Matcher, sample: Sample) -> bool:
    value = sample.labels.get(matcher.name, "")
    match str(matcher.op):
        case "MatchOp.Equal":
            return value == matcher.value
        case "MatchOp.Re":
            return re.fullmatch(matcher.value, value) is not None
    raise ValueError(f"{matcher.op} is more than this reads")
