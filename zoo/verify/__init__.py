"""Is a layer right? A matrix of claims, each proved or broken on its own: see :func:`verify`."""

from zoo.verify.claims import CLAIMS
from zoo.verify.claims.models import MODELS
from zoo.verify.outcome import Claim, Verdict
from zoo.verify.report import SCHEMA, VerifyReport
from zoo.verify.running import verify

__all__ = ["CLAIMS", "MODELS", "SCHEMA", "Claim", "Verdict", "VerifyReport", "verify"]
