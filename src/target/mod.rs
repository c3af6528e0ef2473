//! The NVMe/TCP target: what hosts connect to.
//!
//! ```text
//!   control ──▶ Target (service) ──▶ Subsystem ──▶ NamespaceMap ──▶ Namespace ──▶ device or volume
//!                  │ listener            └──▶ Controller ◀── shared by the queues of one host
//!                  ▼                              ▲
//!               session (one task per connection) │
//!                  └─▶ queue ─┬─ connection: PDUs, digests, transfer tags, what is to be sent
//!                             ├─ admin ── registers, identify, features, log_page, discovery
//!                             └─ io ───── job (the part that waits for a backend)
//! ```
//!
//! Everything from `queue` inwards is sans-IO: it sees no socket, no clock and no thread. A connection lives on one reactor;
//! the queues of a controller may lie on different ones. What they share is read-mostly: no lock is taken for an I/O command.
//!
//! A host is not trusted. Every field is checked before it is used; what is wrong with a command is its status, what is wrong
//! with the stream ends that one connection with the termination request that names it, and nothing a host sends can reach
//! another connection or stop the process.
//!
//! Nothing here survives a crash, and nothing needs to: subsystems and namespaces are configured again at start.
#![forbid(unsafe_code)]

mod admin;
mod ana;
mod command_ids;
mod complaints;
mod connection;
mod controller;
mod discovery;
mod error;
mod fabrics;
mod features;
mod flush;
mod identify;
mod inbox;
mod io;
mod job;
mod listener;
mod log_page;
mod namespace;
mod persistent_events;
mod progress;
mod queue;
mod registers;
mod service;
mod session;
mod share;
mod spec;
mod subsystem;
mod transfer;
mod transmit;

pub use ana::AnaState;
pub use error::TargetError;
pub use namespace::Backend;
pub use service::Target;
pub use spec::*;
