//! How a method is declared, and the check of a call's parameters against the declaration.
//!
//! A method's parameters are read from the caller's own text, one value at a time, so that every fault is
//! reported with the field it is in and nothing is rounded or dropped on the way: a number of 2^64 is out of
//! range, not 1.8e19; a key that appears twice is an error, not its last value. A handler gets values that
//! satisfy the declaration and nothing else.
#![forbid(unsafe_code)]

use super::error::{INTERNAL_ERROR, RpcError};
use super::jsonrpc::{object_members, shortened};
use super::names;
use crate::nearest::nearest;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::net::IpAddr;
use uuid::Uuid;

/// The type of a parameter, as narrow as it can be said.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// `false`: a switch of SPDK for something that is not here. Its clients send the default.
    Off,
    /// Something of SPDK's that is not here: no value is taken.
    Unsupported,
    /// A whole number.
    Unsigned {
        /// The least value taken.
        min: u64,
        /// The greatest value taken.
        max: u64,
    },
    /// One of a few whole numbers.
    Choice(&'static [u64]),
    /// A whole number that may be negative; only some parameters of SPDK are.
    Signed {
        /// The least value taken.
        min: i64,
        /// The greatest value taken.
        max: i64,
    },
    /// Text of 1 to `max` bytes without control characters.
    Text {
        /// The greatest length in bytes.
        max: usize,
    },
    /// Printable ASCII of 1 to `max` characters: serial and model numbers (NVMe Base 2.0, figure 275).
    Ascii {
        /// The greatest length.
        max: usize,
    },
    /// The name for something new: `[A-Za-z0-9][A-Za-z0-9._:@+-]{0,222}`.
    Name,
    /// What names a volume or snapshot: `NAME`, `POOL/NAME` or its UUID.
    Node,
    /// An NVMe qualified name (NVMe Base 2.0, section 4.5).
    Nqn,
    /// A UUID in its usual text form.
    Uuid,
    /// An IPv4 or IPv6 address.
    Address,
    /// Hexadecimal digits, exactly so many: NGUID and EUI64.
    Hex {
        /// The number of digits.
        digits: usize,
    },
    /// One of a few words; case does not matter.
    OneOf(&'static [&'static str]),
    /// An object with members of its own.
    Object(&'static [Param]),
    /// A list of up to `max` values of one type.
    List {
        /// The type of each.
        of: &'static Kind,
        /// The greatest number of values.
        max: usize,
    },
}

/// One parameter.
#[derive(Debug, Clone, Copy)]
pub struct Param {
    /// The key.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Whether a call without it is refused.
    pub required: bool,
    /// One sentence for the reference page.
    pub doc: &'static str,
}

/// A required parameter.
pub const fn required(name: &'static str, kind: Kind, doc: &'static str) -> Param {
    Param { name, kind, required: true, doc }
}

/// A parameter that may be left out. `null` counts as left out.
pub const fn optional(name: &'static str, kind: Kind, doc: &'static str) -> Param {
    Param { name, kind, required: false, doc }
}

/// Any whole number a JSON number can be here.
pub const UNSIGNED: Kind = Kind::Unsigned { min: 0, max: u64::MAX };

/// A checked value.
#[derive(Debug, Clone, PartialEq)]
pub enum Arg {
    /// Of [`Kind::Bool`].
    Bool(bool),
    /// Of [`Kind::Unsigned`] and [`Kind::Choice`].
    Unsigned(u64),
    /// Of [`Kind::Signed`].
    Signed(i64),
    /// Of the text kinds; for [`Kind::OneOf`] the declared spelling.
    Text(String),
    /// Of [`Kind::Uuid`].
    Uuid(Uuid),
    /// Of [`Kind::Address`].
    Address(IpAddr),
    /// Of [`Kind::Object`].
    Object(Params),
    /// Of [`Kind::List`].
    List(Vec<Arg>),
}

/// The checked parameters of a call.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Params {
    values: Vec<(&'static str, Arg)>,
}

/// Checks `text` (the caller's parameters) against `declared`.
pub fn check(declared: &'static [Param], text: Option<&RawValue>) -> Result<Params, RpcError> {
    match text {
        Some(text) if text.get().starts_with('{') => check_object(declared, text.get(), ""),
        Some(_) => Err(RpcError::field("params", "parameters are given by name, in an object")),
        None => check_object(declared, "{}", ""),
    }
}

fn check_object(declared: &'static [Param], text: &str, path: &str) -> Result<Params, RpcError> {
    let members = object_members(text)
        .map_err(|reason| RpcError::field(if path.is_empty() { "params" } else { path }, reason))?;
    let mut values: Vec<(&'static str, Arg)> = Vec::with_capacity(members.len());
    let mut seen: Vec<&str> = Vec::with_capacity(members.len());
    for (name, value) in &members {
        let Some(param) = declared.iter().find(|param| param.name == name) else {
            let shown = shortened(name);
            return Err(unknown(declared, &join(path, &shown), &shown));
        };
        let field = join(path, param.name);
        if seen.contains(&param.name) {
            return Err(RpcError::field(field, "is given twice"));
        }
        seen.push(param.name);
        if value.get() != "null" {
            values.push((param.name, check_value(param.kind, value.get(), &field)?));
        } else if param.required {
            return Err(RpcError::field(field, "is required and must not be null"));
        }
    }
    match declared.iter().find(|param| param.required && !seen.contains(&param.name)) {
        Some(missing) => Err(RpcError::field(join(path, missing.name), "is required")),
        None => Ok(Params { values }),
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn unknown(declared: &[Param], field: &str, name: &str) -> RpcError {
    let names = declared.iter().map(|param| param.name);
    match nearest(name, names.clone()) {
        Some(near) => RpcError::field(field, format!("is not a parameter here; did you mean {near}?"))
            .with("nearest", near),
        None if declared.is_empty() => RpcError::field(field, "the method takes no parameters"),
        None => RpcError::field(
            field,
            format!("is not a parameter here; known are {}", names.collect::<Vec<_>>().join(", ")),
        ),
    }
}

fn check_value(kind: Kind, text: &str, field: &str) -> Result<Arg, RpcError> {
    let fault = |reason: String| RpcError::field(field, reason);
    let string = || -> Result<String, RpcError> {
        if !text.starts_with('"') {
            return Err(fault("must be a string".to_owned()));
        }
        serde_json::from_str(text).map_err(|_| fault("is not valid Unicode text".to_owned()))
    };
    let named = |check: fn(&str) -> Result<(), String>| -> Result<Arg, RpcError> {
        let value = string()?;
        check(&value).map_err(fault)?;
        Ok(Arg::Text(value))
    };
    Ok(match kind {
        Kind::Bool => match text {
            "true" => Arg::Bool(true),
            "false" => Arg::Bool(false),
            _ => return Err(fault("must be true or false".to_owned())),
        },
        Kind::Off => match text {
            "false" => Arg::Bool(false),
            "true" => return Err(fault("is not supported here".to_owned())),
            _ => return Err(fault("must be false".to_owned())),
        },
        Kind::Unsupported => return Err(fault("is not supported here".to_owned())),
        Kind::Unsigned { min: 0, max: 0 } if text != "0" => {
            return Err(fault("must be 0; nothing else is supported here".to_owned()));
        }
        Kind::Unsigned { min, max } => match text.parse::<u64>() {
            Ok(number) if (min..=max).contains(&number) => Arg::Unsigned(number),
            _ => return Err(fault(format!("must be a whole number from {min} to {max}"))),
        },
        Kind::Choice(numbers) => match text.parse::<u64>() {
            Ok(number) if numbers.contains(&number) => Arg::Unsigned(number),
            _ => return Err(fault(format!("must be {}", joined(numbers, " or ")))),
        },
        Kind::Signed { min, max } => match text.parse::<i64>() {
            Ok(number) if (min..=max).contains(&number) => Arg::Signed(number),
            _ => return Err(fault(format!("must be a whole number from {min} to {max}"))),
        },
        Kind::Text { max } => {
            let value = string()?;
            names::text(&value, max).map_err(fault)?;
            Arg::Text(value)
        }
        Kind::Ascii { max } => {
            let value = string()?;
            names::ascii(&value, max).map_err(fault)?;
            Arg::Text(value)
        }
        Kind::Name => named(names::name)?,
        Kind::Node => named(names::node)?,
        Kind::Nqn => named(names::nqn)?,
        Kind::Uuid => match Uuid::try_parse(&string()?) {
            Ok(uuid) if !uuid.is_nil() => Arg::Uuid(uuid),
            Ok(_) => return Err(fault("must not be the nil UUID".to_owned())),
            Err(_) => {
                return Err(fault("must be a UUID such as 8b1e1c4a-1f5e-4d9a-9d0e-3a3a7a7d7b11".to_owned()));
            }
        },
        Kind::Address => match string()?.parse() {
            Ok(address) => Arg::Address(address),
            Err(_) => return Err(fault("must be an IPv4 or IPv6 address, not a name".to_owned())),
        },
        Kind::Hex { digits } => {
            let value = string()?;
            if value.len() != digits || !value.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(fault(format!("must be {digits} hexadecimal digits")));
            }
            Arg::Text(value.to_ascii_uppercase())
        }
        Kind::OneOf(words) => {
            let value = string()?;
            match words.iter().find(|word| word.eq_ignore_ascii_case(&value)) {
                Some(word) => Arg::Text((*word).to_owned()),
                None => return Err(fault(format!("must be one of {}", words.join(", ")))),
            }
        }
        Kind::Object(members) => {
            if !text.starts_with('{') {
                return Err(fault("must be an object".to_owned()));
            }
            Arg::Object(check_object(members, text, field)?)
        }
        Kind::List { of, max } => {
            let items: Vec<&RawValue> = match serde_json::from_str(text) {
                Ok(items) if text.starts_with('[') => items,
                _ => return Err(fault("must be a list".to_owned())),
            };
            if items.len() > max {
                return Err(fault(format!("must hold at most {max} values")));
            }
            let checked = items
                .iter()
                .enumerate()
                .map(|(at, item)| check_value(*of, item.get(), &format!("{field}[{at}]")));
            Arg::List(checked.collect::<Result<_, _>>()?)
        }
    })
}

/// A handler that asks for what its declaration does not hold: our fault, answered instead of a panic.
fn undeclared(name: &str) -> RpcError {
    RpcError::new(INTERNAL_ERROR, format!("parameter {name} is used against its declaration"))
}

macro_rules! getters {
    ($($required:ident $optional:ident $variant:ident $type:ty, $by:expr;)*) => { $(
        #[doc = concat!("A required parameter of kind `", stringify!($variant), "`.")]
        pub fn $required(&self, name: &str) -> Result<$type, RpcError> {
            self.$optional(name)?.ok_or_else(|| undeclared(name))
        }
        #[doc = concat!("An optional parameter of kind `", stringify!($variant), "`.")]
        pub fn $optional(&self, name: &str) -> Result<Option<$type>, RpcError> {
            match self.get(name) {
                Some(Arg::$variant(value)) => Ok(Some($by(value))),
                Some(_) => Err(undeclared(name)),
                None => Ok(None),
            }
        }
    )* };
}

impl Params {
    fn get(&self, name: &str) -> Option<&Arg> {
        self.values.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// Whether the caller gave it.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    getters! {
        bool bool_opt Bool bool, |value: &bool| *value;
        u64 u64_opt Unsigned u64, |value: &u64| *value;
        i64 i64_opt Signed i64, |value: &i64| *value;
        uuid uuid_opt Uuid Uuid, |value: &Uuid| *value;
        address address_opt Address IpAddr, |value: &IpAddr| *value;
        object object_opt Object Params, Params::clone;
        list list_opt List Vec<Arg>, Vec::clone;
    }

    /// A required parameter of a text kind.
    pub fn text(&self, name: &str) -> Result<&str, RpcError> {
        self.text_opt(name)?.ok_or_else(|| undeclared(name))
    }

    /// An optional parameter of a text kind.
    pub fn text_opt(&self, name: &str) -> Result<Option<&str>, RpcError> {
        match self.get(name) {
            Some(Arg::Text(value)) => Ok(Some(value)),
            Some(_) => Err(undeclared(name)),
            None => Ok(None),
        }
    }

    /// A list of texts; empty when left out.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, RpcError> {
        let texts = self.list_opt(name)?.unwrap_or_default().into_iter().map(|item| match item {
            Arg::Text(text) => Ok(text),
            _ => Err(undeclared(name)),
        });
        texts.collect()
    }

    /// A list of objects; empty when left out.
    pub fn objects(&self, name: &str) -> Result<Vec<Params>, RpcError> {
        let objects = self.list_opt(name)?.unwrap_or_default().into_iter().map(|item| match item {
            Arg::Object(object) => Ok(object),
            _ => Err(undeclared(name)),
        });
        objects.collect()
    }
}

fn joined(numbers: &[u64], between: &str) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<String>>().join(between)
}

impl Kind {
    /// The values taken, where they are few enough to be named.
    pub fn values(&self) -> Option<Value> {
        match self {
            Kind::OneOf(words) => Some(json!(words)),
            Kind::Choice(numbers) => Some(json!(numbers)),
            Kind::Off => Some(json!([false])),
            _ => None,
        }
    }

    /// The type as the reference page writes it.
    pub fn describe(&self) -> String {
        match self {
            Kind::Bool => "boolean".to_owned(),
            Kind::Off => "false".to_owned(),
            Kind::Unsupported => "not supported".to_owned(),
            Kind::Unsigned { min: 0, max: 0 } => "0".to_owned(),
            Kind::Unsigned { min: 0, max: u64::MAX } => "whole number".to_owned(),
            Kind::Unsigned { min, max: u64::MAX } => format!("whole number, at least {min}"),
            Kind::Unsigned { min, max } => format!("whole number, {min} to {max}"),
            Kind::Signed { min, max } => format!("whole number, {min} to {max}"),
            Kind::Text { max } => format!("text, up to {max} bytes"),
            Kind::Ascii { max } => format!("printable ASCII, up to {max} characters"),
            Kind::Name => "name".to_owned(),
            Kind::Node => "NAME, POOL/NAME or UUID".to_owned(),
            Kind::Nqn => "NQN".to_owned(),
            Kind::Uuid => "UUID".to_owned(),
            Kind::Address => "IP address".to_owned(),
            Kind::Hex { digits } => format!("{digits} hexadecimal digits"),
            Kind::OneOf(words) => words.join(" | "),
            Kind::Choice(numbers) => joined(numbers, " | "),
            Kind::Object(members) => {
                let members: Vec<&str> = members.iter().map(|member| member.name).collect();
                format!("object: {}", members.join(", "))
            }
            Kind::List { of, .. } => format!("list of {}", of.describe()),
        }
    }
}

#[cfg(test)]
#[path = "schema/tests.rs"]
mod tests;
