//! Calls the daemon over its control socket, blocking, one call per connection.
#![forbid(unsafe_code)]

use super::{Common, Failure};
use crate::config::DEFAULT_SOCKET;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::io::{self, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// A call's parameters; what is `None` is left out.
#[derive(Debug, Default)]
pub struct Arguments(Map<String, Value>);

impl Arguments {
    /// No parameters.
    pub fn new() -> Arguments {
        Arguments::default()
    }

    /// Adds a parameter.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Arguments {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    /// Adds a parameter if there is one.
    pub fn maybe(self, name: &str, value: Option<impl Into<Value>>) -> Arguments {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    /// Adds a flag if it is set.
    pub fn flag(self, name: &str, set: bool) -> Arguments {
        if set { self.with(name, true) } else { self }
    }
}

/// Where the daemon's socket is.
pub fn socket_path(common: &Common) -> PathBuf {
    common.named_socket().unwrap_or_else(|| DEFAULT_SOCKET.into())
}

/// Calls `method` and gives its result.
pub fn call(common: &Common, method: &str, arguments: Arguments) -> Result<Value, Failure> {
    let params = (!arguments.0.is_empty()).then_some(Value::Object(arguments.0));
    call_raw(common, method, params)
}

/// Calls `method` with parameters as they are.
pub fn call_raw(common: &Common, method: &str, params: Option<Value>) -> Result<Value, Failure> {
    let path = socket_path(common);
    let mut stream = UnixStream::connect(&path).map_err(|error| unreachable_daemon(&path, &error))?;
    let mut request = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
    if let (Some(params), Value::Object(request)) = (params, &mut request) {
        request.insert("params".to_owned(), params);
    }
    let broken = |error: &dyn std::fmt::Display| {
        Failure::failed(format!("the daemon at {} went away during {method}: {error}", path.display()))
            .hint("its log says why; the call may or may not have been done, look before you repeat it")
    };
    stream.write_all(request.to_string().as_bytes()).map_err(|error| broken(&error))?;
    let mut reader = serde_json::Deserializer::from_reader(BufReader::new(stream));
    let mut answer = Map::deserialize(&mut reader).map_err(|error| broken(&error))?;
    match (answer.remove("error"), answer.remove("result")) {
        (Some(error), _) => Err(Failure::refused(error)),
        (None, Some(result)) => Ok(result),
        (None, None) => Err(broken(&"the answer has neither a result nor an error")),
    }
}

fn unreachable_daemon(path: &std::path::Path, error: &io::Error) -> Failure {
    let path = path.display();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            Failure::failed(format!("no Rimrock daemon answers at {path}")).hint(
                "start one with `rimrock serve`, or name the socket of a running one with --socket or RIMROCK_SOCKET",
            )
        }
        io::ErrorKind::PermissionDenied => Failure::failed(format!("permission denied on {path}"))
            .hint("the socket belongs to the user who runs the daemon; run this command as that user, or with sudo"),
        _ => Failure::failed(format!("cannot connect to {path}: {error}")),
    }
}
