//! Why a command did not do what was asked, and how that is told: text for people, an error object for programs.
#![forbid(unsafe_code)]

use super::output::Format;
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;

/// Why a command ends early.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    message: String,
    hint: Option<String>,
    /// The daemon's error object, where the daemon refused.
    object: Option<Box<Value>>,
    code: u8,
    /// The answer that was printed says it all.
    told: bool,
}

impl Failure {
    /// Refused or failed: exit code 1.
    pub fn failed(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), hint: None, object: None, code: 1, told: false }
    }

    /// The command line is wrong in a way its parser cannot see: exit code 2.
    pub fn usage(message: impl Into<String>) -> Failure {
        Failure { code: 2, ..Failure::failed(message) }
    }

    /// Nobody reads what is printed any more. That ends the command quietly, as it does every Unix tool.
    pub fn unread() -> Failure {
        Failure { code: 0, ..Failure::failed("nobody reads the answer") }
    }

    /// Whether it is just that nobody reads any more.
    pub fn is_unread(&self) -> bool {
        self.code == 0
    }

    /// What was asked for was done and printed, and is not good: exit code 1 without another word.
    pub fn found() -> Failure {
        Failure { told: true, ..Failure::failed("something is wrong") }
    }

    /// The daemon's answer to a call was this error object.
    pub fn refused(error: Value) -> Failure {
        let message = error["message"].as_str().unwrap_or("the daemon refused the call without a reason");
        let data = &error["data"];
        let reason = data["reason"].as_str().filter(|reason| !message.contains(reason));
        let failure = Failure::failed(match reason {
            Some(reason) => format!("{message}: {reason}"),
            None => message.to_owned(),
        });
        let hint = data["hint"].as_str().map(str::to_owned);
        Failure { hint, object: Some(Box::new(error)), ..failure }
    }

    /// Adds the next step.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the next step where none is known.
    pub fn or_hint(self, hint: impl Into<String>) -> Failure {
        if self.hint.is_some() { self } else { self.hint(hint) }
    }

    /// Prints it to standard error and gives the exit code.
    pub fn report(&self, format: Format) -> ExitCode {
        if self.code > 0 && !self.told {
            // Where standard error is closed too, the exit code alone has to tell.
            let _ = std::io::stderr().write_all(self.told(format).as_bytes());
        }
        ExitCode::from(self.code)
    }

    fn told(&self, format: Format) -> String {
        match (format, &self.hint) {
            (Format::Json, _) => format!("{:#}\n", self.object()),
            (Format::Table, Some(hint)) => format!("rimrock: {}\n  {hint}\n", self.message),
            (Format::Table, None) => format!("rimrock: {}\n", self.message),
        }
    }

    /// `code`, `message` and `data`. Where the daemon had no part in it, the code is the exit code.
    fn object(&self) -> Value {
        let mut object = match &self.object {
            Some(object) => Value::clone(object),
            None => json!({ "code": self.code, "message": self.message }),
        };
        if let Some(hint) = &self.hint {
            object["data"]["hint"] = json!(hint);
        }
        object
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_get_the_daemons_own_error_object() {
        let error =
            json!({ "code": -17, "message": "File exists", "data": { "reason": "taken", "hint": "rename" } });
        let failure = Failure::refused(error.clone());
        assert_eq!(failure.object(), error);
        assert_eq!(failure.told(Format::Table), "rimrock: File exists: taken\n  rename\n");
        let own = Failure::usage("no").hint("yes");
        assert_eq!(own.object(), json!({ "code": 2, "message": "no", "data": { "hint": "yes" } }));
    }
}
