//! Several reactors on one thread, stepped in any order, under a clock that stands still until told to move.
//!
//! These are the reactors that tasks always run on: the same executor, the same mailboxes, the same timers. Missing are
//! the ring (a simulated device completes by timer) and the threads, so that whoever steps them decides all: which
//! reactor runs next, which of its tasks first, and when a message arrives.

#![forbid(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};

use super::executor::Executor;
use super::handle::{Counters, Message, ReactorHandle, ReactorId, Shared};
use super::runtime::{self, Reactor};
use super::world;

struct Seat {
    executor: Executor,
    messages: Receiver<Message>,
    reactor: Rc<Reactor>,
}

/// Reactors that share this thread.
pub struct SimReactors {
    seats: Vec<Seat>,
    start: Instant,
    elapsed: Duration,
}

impl SimReactors {
    /// `count` reactors whose date and chance follow from `seed`.
    pub fn new(count: u16, seed: u64) -> SimReactors {
        let start = Instant::now();
        world::set_chance(Some(seed));
        let seats = (0..count).map(|id| {
            let mut executor = Executor::new();
            executor.simulate(start);
            let (inbox, messages) = unbounded();
            let shared = Shared {
                id: ReactorId(id),
                core: 0,
                remote: Arc::clone(executor.remote()),
                inbox,
                counters: Counters::default(),
            };
            let handle = ReactorHandle { shared: Arc::new(shared) };
            Seat { executor, messages, reactor: Rc::new(Reactor::simulated(handle)) }
        });
        SimReactors { seats: seats.collect(), start, elapsed: Duration::ZERO }
    }

    /// The reactors, by id.
    pub fn handles(&self) -> Vec<ReactorHandle> {
        self.seats.iter().map(|seat| seat.reactor.handle.clone()).collect()
    }

    /// Gives reactor `at` a task.
    pub fn spawn(&mut self, at: usize, task: impl Future<Output = ()> + 'static) {
        self.seats[at].executor.spawn(task);
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// Lets one reactor that has something to do make one pass, its ready tasks in any order. `choose(n)` is a number
    /// below `n`. False when none has anything to do.
    pub fn step(&mut self, mut choose: impl FnMut(usize) -> usize) -> bool {
        let busy: Vec<usize> = (0..self.seats.len()).filter(|at| self.seats[*at].is_busy()).collect();
        if busy.is_empty() {
            return false;
        }
        let at = busy[choose(busy.len())];
        self.enter(at, |seat| {
            seat.executor.shuffle(&mut choose);
            let messages = &seat.messages;
            seat.executor.pass_with(|| messages.try_iter().for_each(|message| message()));
        });
        true
    }

    /// Moves the clock to the next timer. False when there is none.
    pub fn advance(&mut self) -> bool {
        let next = self.seats.iter().filter_map(|seat| seat.executor.next_deadline()).min();
        let Some(next) = next else { return false };
        self.elapsed = self.elapsed.max(next.saturating_duration_since(self.start));
        let now = self.start + self.elapsed;
        for at in 0..self.seats.len() {
            self.enter(at, |seat| seat.executor.set_now(now));
        }
        true
    }

    fn enter<T>(&mut self, at: usize, work: impl FnOnce(&mut Seat) -> T) -> T {
        world::take_seat(at);
        let seat = &mut self.seats[at];
        runtime::set_reactor(Some(Rc::clone(&seat.reactor)));
        let entered = seat.executor.enter();
        let result = work(seat);
        drop(entered);
        runtime::set_reactor(None);
        world::take_seat(0);
        result
    }
}

impl Seat {
    fn is_busy(&self) -> bool {
        self.executor.has_ready() || self.executor.has_idle() || self.executor.is_signalled()
    }
}

impl Drop for SimReactors {
    /// Drops every task, as the end of a process would.
    fn drop(&mut self) {
        for at in 0..self.seats.len() {
            self.enter(at, |seat| seat.executor.clear());
        }
        world::set_chance(None);
    }
}
