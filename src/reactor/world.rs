//! What a task learns from the world outside: the date, and chance. A simulation sets both on its thread, and then
//! the same seed makes the same run.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use uuid::Uuid;

use super::executor;

thread_local! {
    /// State of the generator; none outside of a simulation.
    static CHANCE: Cell<Option<u64>> = const { Cell::new(None) };
    /// Which of the executors of this thread is at work.
    static SEAT: Cell<usize> = const { Cell::new(0) };
}

/// Seconds since 1970.
pub fn unix_now() -> u64 {
    match CHANCE.get() {
        Some(_) => 1_700_000_000 + executor::simulated_time().unwrap_or_default().as_secs(),
        None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs(),
    }
}

/// A UUID that nobody else has (version 4).
pub fn new_uuid() -> Uuid {
    match CHANCE.get() {
        Some(_) => {
            let bits = u128::from(draw()) << 64 | u128::from(draw());
            uuid::Builder::from_random_bytes(bits.to_be_bytes()).into_uuid()
        }
        None => Uuid::new_v4(),
    }
}

/// SplitMix64.
fn draw() -> u64 {
    let state = CHANCE.get().unwrap_or_default().wrapping_add(0x9E37_79B9_7F4A_7C15);
    CHANCE.set(Some(state));
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Which executor of this thread runs: always 0 but in a simulation, where one thread stands for several reactors.
/// What belongs to one reactor is kept under this number.
pub fn seat() -> usize {
    SEAT.get()
}

pub(super) fn take_seat(seat: usize) {
    SEAT.set(seat);
}

/// From now on this thread's date and chance follow from `seed`; `None` ends that.
pub(super) fn set_chance(seed: Option<u64>) {
    CHANCE.set(seed);
}
