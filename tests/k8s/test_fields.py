"""Each field that something breaks without is in every overlay, as it must be; and one that is
taken away is missed."""

import pytest

from tests.k8s.fields import FIELDS, broken, owners, take_away
from tests.k8s.manifests import OVERLAYS, build


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_overlays_have_every_needed_field(field):
    for folder in OVERLAYS:
        assert str(field) not in broken(build(folder)), f"{folder}: {field.why}"


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_overlay_without_a_needed_field_fails_a_test(field):
    objects = build("overlays/eks-spot")
    for owner in owners(objects, field):
        take_away(owner, field)
    assert str(field) in broken(objects)
