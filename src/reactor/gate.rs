//! [`Gate`]: many change different places of one thing at the same time, and now and then one wants a range for itself.
//!
//! Who changes something *passes* the gate for as long as it takes. Who must see a range unchanged from a first look to
//! its own change *claims* it: the claim is granted when everybody is out who may be changing that range, and nobody comes
//! in until it ends. Reading needs no pass.
//!
//! ```text
//!   no claim is there or wanted     a pass is one addition to a counter of the passer's own thread, and one look
//!   one is                          passes and claims stand in line; who overlaps nobody before it goes ahead
//! ```
//!
//! A passer counts itself, then looks for claims; a claimer says that it is there, then reads the counts. All four are in
//! one order, so at least one of the two sees the other.
#![forbid(unsafe_code)]

use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Counters; threads beyond that share them.
const COUNTERS: usize = 16;

/// Lets changes pass, and keeps them out of ranges that are claimed. From any thread.
#[derive(Default)]
pub struct Gate {
    /// Passes that stand in no line.
    passing: [Counter; COUNTERS],
    /// Claims that are granted or wanted.
    claims: AtomicUsize,
    line: Mutex<Line>,
}

/// On a cache line of its own, with its neighbour that processors fetch too.
#[derive(Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

#[derive(Default)]
struct Line {
    next: u64,
    /// Who is in or waits, in order of arrival.
    entries: Vec<Entry>,
}

struct Entry {
    number: u64,
    range: Range<u64>,
    is_claim: bool,
    waker: Option<Waker>,
}

/// The right to change something, until it is dropped.
pub struct Pass<'a> {
    gate: &'a Gate,
    place: Place,
}

enum Place {
    Counter(usize),
    Line(u64),
}

/// A range that nobody else changes, until it is dropped.
pub struct Claim<'a> {
    gate: &'a Gate,
    number: u64,
}

thread_local! {
    static COUNTER: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % COUNTERS
    };
}

impl Gate {
    /// A pass for any range at once, unless there are claims: then [`Gate::pass`] is the way.
    pub fn try_pass(&self) -> Option<Pass<'_>> {
        let counter = COUNTER.try_with(|counter| *counter).unwrap_or(0);
        self.passing[counter].0.fetch_add(1, Ordering::SeqCst);
        // What is dropped here in the other case wakes those who wait for it.
        let pass = Pass { gate: self, place: Place::Counter(counter) };
        (self.claims.load(Ordering::SeqCst) == 0).then_some(pass)
    }

    /// A pass for `range`, once claims before it that overlap have ended.
    pub async fn pass(&self, range: Range<u64>) -> Pass<'_> {
        let number = self.stand_in_line(range, false);
        let pass = Pass { gate: self, place: Place::Line(number) };
        poll_fn(|cx| self.poll_turn(number, cx.waker())).await;
        pass
    }

    /// `range` for the caller alone, once everybody before it has left it.
    pub async fn claim(&self, range: Range<u64>) -> Claim<'_> {
        self.claims.fetch_add(1, Ordering::SeqCst);
        let number = self.stand_in_line(range, true);
        let claim = Claim { gate: self, number };
        poll_fn(|cx| self.poll_turn(number, cx.waker())).await;
        claim
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stand_in_line(&self, range: Range<u64>, is_claim: bool) -> u64 {
        let mut line = self.line();
        let number = line.next;
        line.next += 1;
        line.entries.push(Entry { number, range, is_claim, waker: None });
        number
    }

    fn poll_turn(&self, number: u64, waker: &Waker) -> Poll<()> {
        let mut line = self.line();
        let Some(at) = line.entries.iter().position(|entry| entry.number == number) else {
            return Poll::Ready(());
        };
        let (before, rest) = line.entries.split_at_mut(at);
        let own = &mut rest[0];
        let meets = |other: &Entry| {
            (own.is_claim || other.is_claim)
                && own.range.start < other.range.end
                && other.range.start < own.range.end
        };
        // Whoever passes without standing in line may change any range.
        let is_free = !before.iter().any(meets)
            && (!own.is_claim || self.passing.iter().all(|counter| counter.0.load(Ordering::SeqCst) == 0));
        own.waker = (!is_free).then(|| waker.clone());
        if is_free { Poll::Ready(()) } else { Poll::Pending }
    }

    fn leave_line(&self, number: u64) {
        let mut line = self.line();
        line.entries.retain(|entry| entry.number != number);
        self.wake(line);
    }

    fn wake(&self, mut line: MutexGuard<'_, Line>) {
        let wakers: Vec<Waker> = line.entries.iter_mut().filter_map(|entry| entry.waker.take()).collect();
        drop(line);
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        match self.place {
            Place::Counter(counter) => {
                self.gate.passing[counter].0.fetch_sub(1, Ordering::SeqCst);
                if self.gate.claims.load(Ordering::SeqCst) > 0 {
                    self.gate.wake(self.gate.line());
                }
            }
            Place::Line(number) => self.gate.leave_line(number),
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.gate.claims.fetch_sub(1, Ordering::SeqCst);
        self.gate.leave_line(self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::task::Context;

    use super::*;
    use crate::reactor::block_on;

    fn poll<T>(future: &mut Pin<Box<dyn Future<Output = T> + '_>>) -> Option<T> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_claim_waits_for_all_who_are_in_and_keeps_others_out_of_its_range_only() {
        let gate = Gate::default();
        let early = gate.try_pass().expect("nobody claims anything");
        let mut claim: Pin<Box<dyn Future<Output = Claim<'_>> + '_>> = Box::pin(gate.claim(10..20));
        assert!(poll(&mut claim).is_none());
        assert!(gate.try_pass().is_none(), "a claim is wanted");
        let mut inside: Pin<Box<dyn Future<Output = Pass<'_>> + '_>> = Box::pin(gate.pass(19..30));
        let mut outside: Pin<Box<dyn Future<Output = Pass<'_>> + '_>> = Box::pin(gate.pass(20..30));
        assert!(poll(&mut inside).is_none(), "it comes after the claim");
        let outside = poll(&mut outside).expect("it overlaps nobody");
        drop(early);
        let claim = poll(&mut claim).expect("only the one outside of its range is in");
        let mut second: Pin<Box<dyn Future<Output = Claim<'_>> + '_>> = Box::pin(gate.claim(0..11));
        assert!(poll(&mut second).is_none() && poll(&mut inside).is_none());
        drop((claim, outside));
        let second = poll(&mut second).expect("nobody overlaps it");
        assert!(poll(&mut inside).is_some(), "it does not overlap the second");
        drop(second);
        assert!(gate.try_pass().is_some());
    }

    #[test]
    fn who_gives_up_waiting_holds_nobody_up() {
        let gate = Gate::default();
        let early = gate.try_pass();
        let mut claim: Pin<Box<dyn Future<Output = Claim<'_>> + '_>> = Box::pin(gate.claim(0..8));
        let mut pass: Pin<Box<dyn Future<Output = Pass<'_>> + '_>> = Box::pin(gate.pass(0..8));
        assert!(poll(&mut claim).is_none() && poll(&mut pass).is_none());
        drop(claim);
        assert!(poll(&mut pass).is_some());
        drop((pass, early));
        assert!(gate.try_pass().is_some());
        assert!(pin!(gate.claim(0..1)).poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }

    #[test]
    fn a_claimed_value_is_changed_by_nobody_else() {
        // Two words that every claim finds equal and leaves equal; passes change both, one after the other.
        let shared = Arc::new((Gate::default(), [const { AtomicU64::new(0) }; 2]));
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || {
                    block_on(async move {
                        let (gate, words) = &*shared;
                        let claims = Cell::new(0);
                        for round in 0..5000_u64 {
                            if (round + thread).is_multiple_of(7) {
                                let _claim = gate.claim(0..1).await;
                                let [a, b] = [0, 1].map(|i| words[i].load(Ordering::Relaxed));
                                assert_eq!(a, b);
                                words[0].store(a + 1, Ordering::Relaxed);
                                words[1].store(b + 1, Ordering::Relaxed);
                                claims.set(claims.get() + 1);
                            } else {
                                let _pass = match gate.try_pass() {
                                    Some(pass) => pass,
                                    None => gate.pass(0..1).await,
                                };
                                words[0].fetch_add(1, Ordering::Relaxed);
                                std::hint::spin_loop();
                                words[1].fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        claims.get()
                    })
                })
            })
            .collect();
        let claims: u64 =
            threads.into_iter().map(|thread| thread.join().expect("no claim saw a change")).sum();
        assert!(claims > 2000);
        let total = [0, 1].map(|i| shared.1[i].load(Ordering::Relaxed));
        assert_eq!(total, [4 * 5000; 2]);
    }
}
