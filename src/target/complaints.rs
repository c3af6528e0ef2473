//! How often the log is told of what hosts do: any of them could fill it otherwise.
#![forbid(unsafe_code)]

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::warn;

/// Complaints of one period; further ones are only counted.
const PER_PERIOD: u32 = 20;
const PERIOD: Duration = Duration::from_secs(10);

#[derive(Default)]
pub struct Complaints {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    since: Option<Instant>,
    spoken: u32,
    swallowed: u64,
}

impl Complaints {
    /// Whether the caller may log one more complaint. The first of a period says how many of the last were kept back.
    pub fn may_speak(&self, now: Instant) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| now >= since + PERIOD) {
            let swallowed = std::mem::take(&mut *state).swallowed;
            state.since = Some(now);
            if swallowed > 0 {
                warn!(count = swallowed, "complaints about hosts were not logged: there were too many");
            }
        }
        let may = state.spoken < PER_PERIOD;
        state.spoken += u32::from(may);
        state.swallowed += u64::from(!may);
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_a_new_period_starts_afresh() {
        let complaints = Complaints::default();
        let start = Instant::now();
        let spoken = |now| (0..1000).filter(|_| complaints.may_speak(now)).count();
        assert_eq!(spoken(start), PER_PERIOD as usize);
        assert_eq!(spoken(start + PERIOD / 2), 0);
        assert_eq!(spoken(start + PERIOD), PER_PERIOD as usize);
    }
}
