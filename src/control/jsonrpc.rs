//! JSON-RPC 2.0 without I/O: the text of a message in, checked requests out; answers in, bytes out.
//!
//! Where the specification and SPDK differ we follow the specification, except where only SPDK's habit lets its
//! clients work: the `jsonrpc` member may be missing, and `params: null` means no parameters.
//!
//! An id is kept as the characters the client wrote and goes back as those very characters: an id of
//! 9007199254740993 or 1.5 must not come back rounded.
#![forbid(unsafe_code)]

use super::error::{INVALID_REQUEST, PARSE_ERROR, RpcError};
use super::framing::FrameError;
use serde::Deserializer as _;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// The most requests in one batch: bounds the answer to a few bytes of input.
pub const BATCH_MAX: usize = 1024;

/// A request id as written, quotes included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Id(Box<str>);

impl Id {
    /// The id of an answer to something whose own id could not be read.
    pub fn null() -> Id {
        Id("null".into())
    }

    /// JSON-RPC 2.0 section 4: a string, a number or null.
    fn read(raw: &RawValue) -> Result<Id, RpcError> {
        match raw.get().as_bytes().first() {
            Some(b'"' | b'-' | b'0'..=b'9' | b'n') => Ok(Id(raw.get().into())),
            _ => Err(invalid("id must be a number, a string or null")),
        }
    }
}

/// One call.
#[derive(Debug)]
pub struct Request {
    /// `None` for a notification: run, not answered.
    pub id: Option<Id>,
    /// The method's name, not yet looked up.
    pub method: String,
    /// The text of the parameters; `None` when missing or null.
    pub params: Option<Box<RawValue>>,
}

/// A call that cannot be made, and the id to say so under.
#[derive(Debug)]
pub struct Rejected {
    /// The request's own id when it could be read, else null.
    pub id: Id,
    /// What to answer.
    pub error: RpcError,
}

/// What one frame asks for.
#[derive(Debug)]
pub enum Message {
    /// One request, answered by one object.
    Single(Result<Request, Rejected>),
    /// A batch, answered by one array.
    Batch(Vec<Result<Request, Rejected>>),
    /// Not JSON: answer and close, since where the next request begins is no longer certain.
    Broken(Rejected),
}

/// Reads the text of one frame.
pub fn read_message(text: &[u8]) -> Message {
    let Ok(text) = std::str::from_utf8(text) else {
        return Message::Broken(parse_error("the request is not UTF-8"));
    };
    let raw: &RawValue = match serde_json::from_str(text) {
        Ok(raw) => raw,
        Err(error) => return Message::Broken(parse_error(&error.to_string())),
    };
    if !raw.get().starts_with('[') {
        return Message::Single(read_request(raw));
    }
    match serde_json::from_str::<Vec<&RawValue>>(raw.get()) {
        Ok(requests) if requests.is_empty() => Message::Single(Err(rejected("the batch is empty"))),
        Ok(requests) if requests.len() > BATCH_MAX => {
            Message::Single(Err(rejected(&format!("the batch holds more than {BATCH_MAX} requests"))))
        }
        Ok(requests) => Message::Batch(requests.into_iter().map(read_request).collect()),
        Err(error) => Message::Broken(parse_error(&error.to_string())),
    }
}

/// The answer to a stream that can no longer be followed.
pub fn frame_error(error: FrameError) -> Rejected {
    match error {
        FrameError::Garbage(_) | FrameError::Mismatched | FrameError::Truncated => {
            parse_error(&error.to_string())
        }
        FrameError::NotARequest | FrameError::TooLong | FrameError::TooDeep => rejected(&error.to_string()),
    }
}

/// Appends one answer, in SPDK's order of members.
pub fn write_answer(out: &mut String, id: &Id, answer: &Result<serde_json::Value, RpcError>) {
    out.push_str(r#"{"jsonrpc":"2.0","id":"#);
    out.push_str(&id.0);
    match answer {
        Ok(result) => {
            out.push_str(r#","result":"#);
            out.push_str(&result.to_string());
        }
        Err(error) => {
            out.push_str(r#","error":"#);
            out.push_str(&error.to_value().to_string());
        }
    }
    out.push('}');
}

fn invalid(reason: &str) -> RpcError {
    RpcError::new(INVALID_REQUEST, "Invalid request").with("reason", reason)
}

fn rejected(reason: &str) -> Rejected {
    Rejected { id: Id::null(), error: invalid(reason) }
}

fn parse_error(reason: &str) -> Rejected {
    Rejected {
        id: Id::null(),
        error: RpcError::new(PARSE_ERROR, "Parse error").with("reason", reason.to_owned()),
    }
}

fn read_request(raw: &RawValue) -> Result<Request, Rejected> {
    if !raw.get().starts_with('{') {
        return Err(rejected("a request is an object"));
    }
    let members = match object_members(raw.get()) {
        Ok(members) => members,
        Err(reason) => return Err(rejected(&reason)),
    };
    let mut slots: [Option<&RawValue>; 4] = [None; 4];
    const NAMES: [&str; 4] = ["jsonrpc", "method", "params", "id"];
    let mut fault = None;
    for (name, value) in members {
        match NAMES.iter().position(|known| *known == name) {
            Some(slot) if slots[slot].is_some() => fault = Some(format!("member {name:?} appears twice")),
            Some(slot) => slots[slot] = Some(value),
            None => {
                let meant = crate::nearest::nearest(&name, NAMES)
                    .map_or(String::new(), |near| format!("; did you mean {near:?}?"));
                fault = Some(format!("unknown member {:?}{meant}", shortened(&name)));
            }
        }
    }
    let [version, method, params, id] = slots;
    let id = match id.map(Id::read).transpose() {
        Ok(id) => id,
        Err(error) => return Err(Rejected { id: Id::null(), error }),
    };
    let refuse = |reason: &str| Rejected { id: id.clone().unwrap_or_else(Id::null), error: invalid(reason) };
    if let Some(fault) = fault {
        return Err(refuse(&fault));
    }
    if version.is_some_and(|version| version.get() != r#""2.0""#) {
        return Err(refuse(r#"jsonrpc must be "2.0""#));
    }
    let Some(method) = method else { return Err(refuse("method is missing")) };
    let Ok(method) = serde_json::from_str::<String>(method.get()) else {
        return Err(refuse("method must be a string"));
    };
    let params = params.filter(|params| params.get() != "null").map(ToOwned::to_owned);
    Ok(Request { id, method, params })
}

/// As much of a caller's word as is needed to find it again in the request.
pub fn shortened(word: &str) -> String {
    const SHOWN: usize = 100;
    match word.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &word[..end]),
        None => word.to_owned(),
    }
}

/// The members of an object in their order, doubles included: what a map type would silently drop is an error
/// that the caller names.
pub fn object_members(text: &str) -> Result<Vec<(String, &RawValue)>, String> {
    struct Members;
    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, &'de RawValue)>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some(name) = map.next_key::<String>()? {
                members.push((name, map.next_value::<&'de RawValue>()?));
            }
            Ok(members)
        }
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    reader.deserialize_map(Members).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn single(text: &str) -> Result<Request, Rejected> {
        match read_message(text.as_bytes()) {
            Message::Single(single) => single,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn ids_come_back_as_they_were_written() {
        let long = format!("\"{}\"", "x".repeat(65536));
        for id in [
            "1",
            "-1",
            "1.5",
            "1e20",
            "2147483648",
            "9007199254740993",
            "9223372036854775808",
            "18446744073709551615",
            "1E400",
            "\"\"",
            "\"abc\"",
            "\"\\u00e9\\\"\"",
            "null",
            &long,
        ] {
            let request = single(&format!(r#"{{"method":"m","id": {id} }}"#)).unwrap();
            let mut out = String::new();
            write_answer(&mut out, &request.id.unwrap(), &Ok(json!(true)));
            assert_eq!(out, format!(r#"{{"jsonrpc":"2.0","id":{id},"result":true}}"#));
        }
    }

    #[test]
    fn ids_of_another_type_are_refused_under_null() {
        for id in ["true", "false", "[]", "{}", "[1]"] {
            let rejected = single(&format!(r#"{{"method":"m","id":{id}}}"#)).unwrap_err();
            assert_eq!((rejected.id, rejected.error.code), (Id::null(), INVALID_REQUEST), "{id}");
        }
    }

    #[test]
    fn a_bad_request_is_refused_under_its_own_id() {
        for (text, word) in [
            (r#"{"id":7}"#, "method is missing"),
            (r#"{"id":7,"method":5}"#, "method must be a string"),
            (r#"{"id":7,"method":"m","jsonrpc":"1.0"}"#, "2.0"),
            (r#"{"id":7,"method":"m","parms":{}}"#, "params"),
            (r#"{"id":7,"method":"m","method":"n"}"#, "twice"),
        ] {
            let rejected = single(text).unwrap_err();
            assert_eq!((rejected.id, rejected.error.code), (Id("7".into()), INVALID_REQUEST), "{text}");
            assert!(rejected.error.data.unwrap().to_string().contains(word), "{text}");
        }
        assert_eq!(single(r#"{"id":7,"id":8,"method":"m"}"#).unwrap_err().error.code, INVALID_REQUEST);
    }

    #[test]
    fn missing_and_null_are_told_apart_for_ids_only() {
        assert!(single(r#"{"method":"m"}"#).unwrap().id.is_none());
        assert_eq!(single(r#"{"method":"m","id":null}"#).unwrap().id, Some(Id::null()));
        assert!(single(r#"{"method":"m","params":null}"#).unwrap().params.is_none());
        assert!(single(r#"{"method":"m","params":{}}"#).unwrap().params.is_some());
    }

    #[test]
    fn what_is_not_json_is_a_parse_error() {
        for text in [
            &br#"{"a":}"#[..],
            b"{\"a\":01}",
            b"{\"method\":\"\xff\"}",
            b"[1,]",
            b"{'a':1}",
            b"{\"a\":\"\x01\"}",
        ] {
            match read_message(text) {
                Message::Broken(rejected) => assert_eq!(rejected.error.code, PARSE_ERROR),
                other => panic!("{text:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn batches_keep_their_order_and_their_bad_members() {
        let Message::Batch(batch) = read_message(br#"[{"method":"a","id":1},5,{"method":"b"}]"#) else {
            panic!("not a batch");
        };
        assert_eq!(batch[0].as_ref().unwrap().method, "a");
        assert_eq!(batch[1].as_ref().unwrap_err().id, Id::null());
        assert!(batch[2].as_ref().unwrap().id.is_none());
        assert_eq!(single("[]").unwrap_err().error.code, INVALID_REQUEST);
        let many = format!("[{}1]", "1,".repeat(BATCH_MAX));
        assert_eq!(single(&many).unwrap_err().error.code, INVALID_REQUEST);
    }

    #[test]
    fn answers_are_strict_json() {
        let text = "quote \" backslash \\ \u{1} \u{2028} 😀";
        let mut out = String::new();
        write_answer(&mut out, &Id::null(), &Err(RpcError::field(text, text)));
        let back: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(back["error"]["data"]["field"], text);
        assert!(!out.bytes().any(|byte| byte < 0x20));
    }
}
