//! The NVMe/TCP target.
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "the queues that use most of this come with the next change")]

mod connection;
mod controller;
mod error;
mod inbox;
mod listener;
mod namespace;
mod service;
mod session;
mod spec;
mod subsystem;
mod transfer;
mod transmit;

pub use error::TargetError;
pub use namespace::Backend;
pub use service::Target;
pub use spec::*;
