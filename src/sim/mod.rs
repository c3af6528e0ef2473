//! A deterministic simulator: the real pool on simulated devices, reactors and time, all from one seed, with a model that
//! knows what every byte may be.
//!
//! A *run* is a sequence of *lives* of one pool. In each, hosts write, trim, flush and read volumes while an operator takes
//! snapshots, clones, rolls back and deletes; then the power fails, or the process is killed, or the pool is closed; and the
//! next life begins with a look at everything. Which task runs next, which device answers first, what a power cut leaves:
//! chance decides, and the seed decides chance.
//!
//! | file | what |
//! |---|---|
//! | `layout` | which blocks are used and what is written into them |
//! | `model` | what may be read, be in a snapshot, be left by a crash |
//! | `family` | who grew from whom, and who is pinned |
//! | `hosts`, `operator` | what is done to the pool |
//! | `care` | what an operator does to keep a pool well: checks with repair, scrubs |
//! | `check` | looking at everything after a crash |
//! | `compare` | differences between two nodes, while hosts write |
//! | `life`, `world` | one life of the pool |
//! | `run` | whole runs: at random, and with the power cut at every step in turn |

#![forbid(unsafe_code)]

mod care;
mod chance;
mod check;
mod compare;
mod family;
mod hosts;
mod layout;
mod life;
mod model;
mod operator;
mod run;
#[cfg(test)]
mod tests;
mod world;

pub use run::{Failure, Options, Report, every_step, run};
