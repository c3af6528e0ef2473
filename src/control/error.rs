//! What a method answers when it refuses or fails: a JSON-RPC error object.
//!
//! Protocol faults use JSON-RPC 2.0's own codes (section 5.1). What the appliance refuses is answered with a
//! negative errno, as SPDK's clients expect: `-17` is "File exists" to a CSI driver, whoever sent it.
#![forbid(unsafe_code)]

use serde_json::{Value, json};

/// JSON-RPC 2.0 section 5.1: the bytes are not JSON.
pub const PARSE_ERROR: i64 = -32700;
/// JSON-RPC 2.0 section 5.1: JSON, but not a request.
pub const INVALID_REQUEST: i64 = -32600;
/// JSON-RPC 2.0 section 5.1.
pub const METHOD_NOT_FOUND: i64 = -32601;
/// JSON-RPC 2.0 section 5.1; `data` says which field and why.
pub const INVALID_PARAMS: i64 = -32602;
/// JSON-RPC 2.0 section 5.1.
pub const INTERNAL_ERROR: i64 = -32603;

/// An error as it goes over the socket. `data` is an object or absent.
#[derive(Debug, Clone, PartialEq)]
pub struct RpcError {
    /// A code of JSON-RPC 2.0 or a negative errno.
    pub code: i64,
    /// One line for a person; SPDK's own text where SPDK has one.
    pub message: String,
    /// Details for a program: `field` and `reason` for a bad parameter, `reason` and `hint` otherwise.
    pub data: Option<Value>,
}

impl RpcError {
    /// An error without details.
    pub fn new(code: i64, message: impl Into<String>) -> RpcError {
        RpcError { code, message: message.into(), data: None }
    }

    /// A parameter that is missing, mistyped, out of range or of the wrong form (-32602).
    pub fn field(field: impl Into<String>, reason: impl Into<String>) -> RpcError {
        let (field, reason) = (field.into(), reason.into());
        RpcError {
            code: INVALID_PARAMS,
            message: format!("Invalid parameter {field}: {reason}"),
            data: Some(json!({ "field": field, "reason": reason })),
        }
    }

    /// A refusal by the appliance: `errno` is positive here and negated on the wire.
    pub fn refused(errno: i32, message: impl Into<String>) -> RpcError {
        RpcError::new(-i64::from(errno), message)
    }

    /// The same error under SPDK's code and text, with our own sentence kept in `data.reason`.
    pub fn spoken_as(self, code: i64, message: &str) -> RpcError {
        let mut data = match self.data {
            Some(Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        };
        data.entry("reason").or_insert(Value::String(self.message));
        RpcError { code, message: message.to_owned(), data: Some(Value::Object(data)) }
    }

    /// Adds one member to `data`.
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> RpcError {
        let data = self.data.get_or_insert_with(|| json!({}));
        if let Value::Object(map) = data {
            map.insert(key.to_owned(), value.into());
        }
        self
    }

    /// Adds what the caller can do next.
    pub fn hint(self, hint: impl Into<String>) -> RpcError {
        self.with("hint", hint.into())
    }

    /// The error object of JSON-RPC 2.0 section 5.1.
    pub fn to_value(&self) -> Value {
        let mut object = json!({ "code": self.code, "message": self.message });
        if let (Some(data), Value::Object(map)) = (&self.data, &mut object) {
            map.insert("data".to_owned(), data.clone());
        }
        object
    }
}

/// The text SPDK gives with an errno, as recorded from its socket.
pub fn errno_text(errno: i32) -> &'static str {
    match errno {
        libc::EPERM => "Operation not permitted",
        libc::ENOENT => "No such file or directory",
        libc::EIO => "Input/output error",
        libc::ENOMEM => "Cannot allocate memory",
        libc::EAGAIN => "Resource temporarily unavailable",
        libc::EBUSY => "Device or resource busy",
        libc::EEXIST => "File exists",
        libc::ENODEV => "No such device",
        libc::EINVAL => "Invalid argument",
        libc::ENOSPC => "No space left on device",
        libc::EROFS => "Read-only file system",
        libc::ENOTSUP => "Operation not supported",
        libc::EADDRINUSE => "Address already in use",
        libc::EADDRNOTAVAIL => "Cannot assign requested address",
        _ => "Operation failed",
    }
}
