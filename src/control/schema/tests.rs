#![forbid(unsafe_code)]

use super::*;
use crate::control::error::INVALID_PARAMS;
use serde_json::{Value, json};

const ADDRESS: &[Param] =
    &[required("traddr", Kind::Address, ""), optional("trtype", Kind::OneOf(&["TCP", "RDMA"]), "")];
const DECLARED: &[Param] = &[
    required("name", Kind::Name, ""),
    optional("size", Kind::Unsigned { min: 1, max: u64::MAX }, ""),
    optional("thin", Kind::Bool, ""),
    optional("offset", Kind::Signed { min: -5, max: 5 }, ""),
    optional("uuid", Kind::Uuid, ""),
    optional("nguid", Kind::Hex { digits: 32 }, ""),
    optional("serial", Kind::Ascii { max: 20 }, ""),
    optional("address", Kind::Object(ADDRESS), ""),
    optional("devices", Kind::List { of: &Kind::Text { max: 64 }, max: 2 }, ""),
];

fn call(text: &str) -> Result<Params, RpcError> {
    let raw: &RawValue = serde_json::from_str(text).unwrap();
    check(DECLARED, Some(raw))
}

#[test]
fn a_full_call_gives_every_value() {
    let params = call(
        r#"{"name":"v\u0030","size":18446744073709551615,"thin":false,"offset":-5,
            "uuid":"8B1E1C4A-1f5e-4d9a-9d0e-3a3a7a7d7b11","nguid":"abcdef0123456789abcdef0123456789","serial":"S 1",
            "address":{"traddr":"::1","trtype":"tcp"},"devices":["a","b"]}"#,
    )
    .unwrap();
    assert_eq!(params.text("name").unwrap(), "v0");
    assert_eq!(params.u64("size").unwrap(), u64::MAX);
    assert!(!params.bool("thin").unwrap());
    assert_eq!(params.i64("offset").unwrap(), -5);
    assert_eq!(params.text("nguid").unwrap(), "ABCDEF0123456789ABCDEF0123456789");
    let address = params.object("address").unwrap();
    assert_eq!(address.address("traddr").unwrap().to_string(), "::1");
    assert_eq!(address.text("trtype").unwrap(), "TCP");
    assert_eq!(params.texts("devices").unwrap(), ["a", "b"]);
    assert!(params.has("uuid"));
}

#[test]
fn null_and_missing_are_the_same_for_optional_parameters() {
    assert_eq!(call(r#"{"name":"a","size":null}"#).unwrap(), call(r#"{"name":"a"}"#).unwrap());
    assert_eq!(call(r#"{"name":"a"}"#).unwrap().u64_opt("size").unwrap(), None);
}

#[test]
fn every_fault_names_its_field() {
    for (text, field) in [
        ("[]", "params"),
        ("5", "params"),
        ("{}", "name"),
        (r#"{"name":null}"#, "name"),
        (r#"{"name":""}"#, "name"),
        (r#"{"name":5}"#, "name"),
        (r#"{"name":"a b"}"#, "name"),
        (r#"{"name":"\ud800"}"#, "name"),
        (r#"{"name":"a","bogus":1}"#, "bogus"),
        (r#"{"name":"a","name":"a"}"#, "name"),
        (r#"{"name":"a","size":0}"#, "size"),
        (r#"{"name":"a","size":-1}"#, "size"),
        (r#"{"name":"a","size":1.5}"#, "size"),
        (r#"{"name":"a","size":1e3}"#, "size"),
        (r#"{"name":"a","size":1e400}"#, "size"),
        (r#"{"name":"a","size":18446744073709551616}"#, "size"),
        (r#"{"name":"a","size":"10GiB"}"#, "size"),
        (r#"{"name":"a","size":[1]}"#, "size"),
        (r#"{"name":"a","thin":1}"#, "thin"),
        (r#"{"name":"a","thin":"true"}"#, "thin"),
        (r#"{"name":"a","offset":6}"#, "offset"),
        (r#"{"name":"a","uuid":"x"}"#, "uuid"),
        (r#"{"name":"a","uuid":"00000000-0000-0000-0000-000000000000"}"#, "uuid"),
        (r#"{"name":"a","nguid":"12"}"#, "nguid"),
        (r#"{"name":"a","serial":"123456789012345678901"}"#, "serial"),
        (r#"{"name":"a","serial":"é"}"#, "serial"),
        (r#"{"name":"a","address":[]}"#, "address"),
        (r#"{"name":"a","address":{}}"#, "address.traddr"),
        (r#"{"name":"a","address":{"traddr":"localhost"}}"#, "address.traddr"),
        (r#"{"name":"a","address":{"traddr":"::1","trtype":"FC"}}"#, "address.trtype"),
        (r#"{"name":"a","address":{"traddr":"::1","port":1}}"#, "address.port"),
        (r#"{"name":"a","devices":{}}"#, "devices"),
        (r#"{"name":"a","devices":["a","b","c"]}"#, "devices"),
        (r#"{"name":"a","devices":["a",""]}"#, "devices[1]"),
        (r#"{"name":"a","devices":["a\u001f"]}"#, "devices[0]"),
    ] {
        let error = call(text).expect_err(text);
        assert_eq!(error.code, INVALID_PARAMS, "{text}");
        let data = error.data.unwrap_or(Value::Null);
        assert_eq!(data["field"], json!(field), "{text}");
        assert!(data["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{text}");
    }
}

#[test]
fn an_unknown_key_is_answered_with_the_nearest_known_one() {
    let error = call(r#"{"name":"a","szie":5}"#).unwrap_err();
    assert_eq!(error.data.unwrap()["nearest"], "size");
}

#[test]
fn a_handler_that_asks_for_another_type_gets_an_error_and_no_panic() {
    let params = call(r#"{"name":"a","size":5}"#).unwrap();
    assert_eq!(params.bool("size").unwrap_err().code, INTERNAL_ERROR);
    assert_eq!(params.text("other").unwrap_err().code, INTERNAL_ERROR);
}
