"""A replica's keys: the router shows that it is the router, and names the client's key."""

from __future__ import annotations

import hashlib

import pytest

from headrace.core.errors import AuthenticationError
from headrace.server.access.trusted import KEY_HEADER, TrustedKeys, named_in_header

INTERNAL = hashlib.sha256(b"internal").digest()


def sent(key: str, name: str | None = None) -> dict[str, str]:
    headers = {"authorization": f"Bearer {key}"}
    return headers if name is None else {**headers, KEY_HEADER: name}


def test_only_the_router_is_let_in() -> None:
    keys = TrustedKeys(INTERNAL, {"ann": 2, "ben": 1})
    for headers in ({}, sent("wrong"), sent("wrong", "ann"), {KEY_HEADER: "ann"}):
        with pytest.raises(AuthenticationError):
            keys.authenticate(headers)


def test_the_client_has_its_name_weight_and_cache() -> None:
    keys = TrustedKeys(INTERNAL, {"ann": 2, "ben": 1})
    assert keys.authenticate(sent("internal", "ann")) == "ann"
    assert keys.authenticate(sent("internal")) == "default"
    assert keys.authenticate(sent("internal", "nobody")) == "default"
    assert keys.weights["ann"] == 2
    assert keys.cache_salt("ann", "") != keys.cache_salt("ben", "")


def test_a_name_may_be_any_text() -> None:
    name = "Änn\r\nx-evil: 1 %20"
    written = named_in_header(name)
    assert not {*b"\r\n :"} & {*written}
    keys = TrustedKeys(INTERNAL, {name: 1, "ben": 1})
    assert keys.authenticate(sent("internal", written.decode("latin-1"))) == name


def test_one_tenant_shares_its_cache_and_may_have_the_routers_name() -> None:
    keys = TrustedKeys(INTERNAL, {"default": 3})
    assert keys.authenticate(sent("internal", "default")) == "default"
    assert keys.weights == {"default": 3}
    assert keys.cache_salt("default", "x") == "x"
