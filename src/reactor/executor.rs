//! The single-threaded task executor of a reactor. It knows nothing of the operating system: no clock, no
//! ring, no threads. Time is what [`Executor::set_now`] says, so a simulator can step it.
//!
//! ```text
//!            spawn                 poll: Pending              woken
//!   (free) ────────► ready ───────────────────────► waiting ────────► ready
//!      ▲               │ poll: Pending, yield_idle      │ woken
//!      │ poll: Ready   ▼                                │
//!      └───────────── idle ◄────────────────────────────┘ (yield_idle wakes only)
//! ```
//!
//! One pass polls every task that was ready when the pass began, in the order they became ready, then the
//! idle ones. What is woken meanwhile runs in the next pass, so no task can starve another. An idle task is
//! one that polls something hot, a socket say, and found nothing: it runs in every pass but does not count
//! as work.
//!
//! Tasks live in slots that are recycled with their wakers; after start-up only `spawn` allocates (the box
//! of the future).

#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::timer::Timers;
use super::wake::{self, Remote};

type Task = Pin<Box<dyn Future<Output = ()>>>;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Core>>> = const { RefCell::new(None) };
}

/// Where a slot stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queued {
    No,
    Idle,
    Ready,
}

/// The state that running tasks reach through the thread-local.
pub(super) struct Core {
    remote: Arc<Remote>,
    ready: RefCell<VecDeque<u32>>,
    idle: RefCell<Vec<u32>>,
    queued: RefCell<Vec<Queued>>,
    /// The pass in which each slot was last polled, and the one that runs.
    polled_in: RefCell<Vec<u64>>,
    pass: Cell<u64>,
    slots: RefCell<Slots>,
    /// Set while a `yield_idle` wakes its task, so that the wake lands in the idle queue.
    waking_idle: Cell<bool>,
    now: Cell<Instant>,
    /// When simulated time began; none where time is real.
    simulated_since: Cell<Option<Instant>>,
    pub(super) timers: RefCell<Timers>,
    polls: Cell<u64>,
}

#[derive(Default)]
struct Slots {
    tasks: Vec<Slot>,
    free: Vec<u32>,
    live: usize,
}

struct Slot {
    /// Taken out while it is being polled.
    task: Option<Task>,
    waker: Waker,
    occupied: bool,
}

/// What one pass did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Tasks polled that were ready: real work.
    pub worked: usize,
    /// Tasks polled that only look for work.
    pub idled: usize,
}

/// A set of `!Send` tasks and the queue of those that may run.
pub struct Executor {
    core: Rc<Core>,
    idle_scratch: Vec<u32>,
    woken_scratch: Vec<Waker>,
}

impl Default for Executor {
    fn default() -> Executor {
        Executor::new()
    }
}

impl Executor {
    /// An executor that nobody needs to kick, since its owner never sleeps while it has work.
    pub fn new() -> Executor {
        Executor::with_kick(Box::new(|| ()))
    }

    /// `kick` is called when another thread wakes a task after [`Executor::prepare_sleep`] said true.
    pub(super) fn with_kick(kick: Box<dyn Fn() + Send + Sync>) -> Executor {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let core = Core {
            remote: Arc::new(Remote::new(id, kick)),
            ready: RefCell::default(),
            idle: RefCell::default(),
            queued: RefCell::default(),
            polled_in: RefCell::default(),
            pass: Cell::new(0),
            slots: RefCell::default(),
            waking_idle: Cell::new(false),
            now: Cell::new(Instant::now()),
            simulated_since: Cell::new(None),
            timers: RefCell::default(),
            polls: Cell::new(0),
        };
        Executor { core: Rc::new(core), idle_scratch: Vec::new(), woken_scratch: Vec::new() }
    }

    pub(super) fn remote(&self) -> &Arc<Remote> {
        &self.core.remote
    }

    /// Adds a task; it runs in the next pass.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.core.spawn(Box::pin(future));
    }

    /// Number of tasks that have not finished.
    pub fn len(&self) -> usize {
        self.core.slots.borrow().live
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Polls made since the start.
    pub fn polls(&self) -> u64 {
        self.core.polls.get()
    }

    /// Sets the time tasks see and fires the timers that are due.
    pub fn set_now(&mut self, now: Instant) {
        self.core.now.set(now);
        let mut timers = self.core.timers.borrow_mut();
        if timers.next_deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        timers.take_due(now, &mut self.woken_scratch);
        drop(timers);
        let _entered = Entered::new(&self.core);
        self.woken_scratch.drain(..).for_each(Waker::wake);
    }

    pub fn now(&self) -> Instant {
        self.core.now.get()
    }

    /// When the next timer is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.core.timers.borrow_mut().next_deadline()
    }

    /// Whether a task is ready, not counting those that only look for work.
    pub fn has_ready(&self) -> bool {
        !self.core.ready.borrow().is_empty()
    }

    /// Whether a task is waiting in `yield_idle`.
    pub fn has_idle(&self) -> bool {
        !self.core.idle.borrow().is_empty()
    }

    /// Lets time begin at `start` and stand there until [`set_now`](Executor::set_now).
    pub(super) fn simulate(&mut self, start: Instant) {
        self.core.simulated_since.set(Some(start));
        self.core.now.set(start);
    }

    /// Brings the ready tasks in another order. `choose(n)` is a number below `n`.
    pub(super) fn shuffle(&mut self, mut choose: impl FnMut(usize) -> usize) {
        let mut ready = self.core.ready.borrow_mut();
        for at in (1..ready.len()).rev() {
            ready.swap(at, choose(at + 1));
        }
    }

    /// Whether another executor woke a task of this one or sent it a message.
    pub(super) fn is_signalled(&self) -> bool {
        self.core.remote.is_signalled()
    }

    /// Moves what other threads woke to the ready queue.
    fn collect_remote(&self) -> bool {
        let signalled = self.core.remote.take_signal();
        if signalled {
            self.core.remote.drain(|slot| self.core.schedule(slot, Queued::Ready));
        }
        signalled
    }

    /// Whether it is safe to sleep: nothing came from other threads. When true, one that comes later kicks.
    pub(super) fn prepare_sleep(&self) -> bool {
        self.core.remote.prepare_sleep()
    }

    pub(super) fn end_sleep(&self) {
        self.core.remote.end_sleep();
    }

    /// Makes this executor the current one of this thread until the guard is dropped.
    pub(super) fn enter(&self) -> Entered {
        Entered::new(&self.core)
    }

    /// Polls each task that is ready now once, then each idle one. `on_signal` runs first when another
    /// thread signalled.
    pub(super) fn pass_with(&mut self, on_signal: impl FnOnce()) -> Pass {
        if self.collect_remote() {
            on_signal();
        }
        let core = &*self.core;
        core.pass.set(core.pass.get() + 1);
        let mut pass = Pass { worked: 0, idled: 0 };
        std::mem::swap(&mut *core.idle.borrow_mut(), &mut self.idle_scratch);
        let ready = core.ready.borrow().len();
        for _ in 0..ready {
            let Some(slot) = core.ready.borrow_mut().pop_front() else { break };
            pass.worked += 1;
            core.poll(slot);
        }
        for slot in self.idle_scratch.drain(..) {
            // Woken for real since: it is in the ready queue, or has run, and may be idle again.
            let has_run = core.polled_in.borrow()[slot as usize] == core.pass.get();
            if !has_run && core.queued.borrow()[slot as usize] == Queued::Idle {
                pass.idled += 1;
                core.poll(slot);
            }
        }
        pass
    }

    /// One pass over the tasks that may run.
    pub fn pass(&mut self) -> Pass {
        let _entered = self.enter();
        self.pass_with(|| ())
    }

    /// Passes until no task is ready. Idle tasks are polled along, but do not keep it going. Returns the
    /// number of polls that were work.
    pub fn run_until_stalled(&mut self) -> usize {
        let mut worked = 0;
        loop {
            let pass = self.pass();
            worked += pass.worked;
            if pass.worked == 0 {
                return worked;
            }
        }
    }

    /// Drops every task, and those that dropping them spawns.
    pub fn clear(&mut self) {
        let _entered = self.enter();
        loop {
            let tasks: Vec<Task> = {
                let mut slots = self.core.slots.borrow_mut();
                slots.tasks.iter_mut().filter_map(|slot| slot.task.take()).collect()
            };
            if tasks.is_empty() {
                break;
            }
            drop(tasks);
        }
        let mut slots = self.core.slots.borrow_mut();
        slots.live = 0;
        slots.free.clear();
        for index in (0..slots.tasks.len()).rev() {
            slots.tasks[index].occupied = false;
            slots.free.push(index as u32);
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.clear();
    }
}

impl Core {
    pub(super) fn remote_id(&self) -> u64 {
        self.remote.id()
    }

    fn spawn(&self, task: Task) {
        let mut slots = self.slots.borrow_mut();
        let index = match slots.free.pop() {
            Some(index) => index,
            None => {
                let index = slots.tasks.len() as u32;
                let waker = wake::waker(&self.remote, index);
                slots.tasks.push(Slot { task: None, waker, occupied: false });
                self.queued.borrow_mut().push(Queued::No);
                self.polled_in.borrow_mut().push(0);
                index
            }
        };
        let slot = &mut slots.tasks[index as usize];
        slot.task = Some(task);
        slot.occupied = true;
        slots.live += 1;
        drop(slots);
        self.schedule(index, Queued::Ready);
    }

    fn schedule(&self, slot: u32, wanted: Queued) {
        let mut queued = self.queued.borrow_mut();
        let state = &mut queued[slot as usize];
        match (*state, wanted) {
            (Queued::No | Queued::Idle, Queued::Ready) => self.ready.borrow_mut().push_back(slot),
            (Queued::No, Queued::Idle) => self.idle.borrow_mut().push(slot),
            _ => return,
        }
        *state = wanted;
    }

    fn poll(&self, slot: u32) {
        let index = slot as usize;
        self.queued.borrow_mut()[index] = Queued::No;
        self.polled_in.borrow_mut()[index] = self.pass.get();
        let (mut task, waker) = {
            let mut slots = self.slots.borrow_mut();
            let entry = &mut slots.tasks[index];
            // A stale waker may have queued a slot that is free.
            let Some(task) = entry.task.take() else { return };
            // The waker is lent out by swapping, which costs no reference count.
            (task, std::mem::replace(&mut entry.waker, Waker::noop().clone()))
        };
        self.polls.set(self.polls.get() + 1);
        let done = task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        let finished = {
            let mut slots = self.slots.borrow_mut();
            let entry = &mut slots.tasks[index];
            entry.waker = waker;
            if done {
                entry.occupied = false;
                slots.live -= 1;
                slots.free.push(slot);
                Some(task)
            } else {
                entry.task = Some(task);
                None
            }
        };
        // Dropped after the slots are released: a destructor may spawn or wake.
        drop(finished);
    }
}

/// While it lives, its executor is the thread's current one.
pub(super) struct Entered {
    previous: Option<Rc<Core>>,
}

impl Entered {
    fn new(core: &Rc<Core>) -> Entered {
        Entered { previous: CURRENT.with(|current| current.borrow_mut().replace(Rc::clone(core))) }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.with(|current| *current.borrow_mut() = self.previous.take());
    }
}

/// Makes another executor the thread's current one, or none, and gives the one before: for threads that take turns on one.
#[cfg(test)]
pub(super) fn exchange_current(core: Option<Rc<Core>>) -> Option<Rc<Core>> {
    CURRENT.with(|current| std::mem::replace(&mut *current.borrow_mut(), core))
}

/// Queues a task of the current executor if that is the one with this id.
pub(super) fn wake_local(id: u64, slot: u32) -> bool {
    CURRENT
        .try_with(|current| {
            let current = current.borrow();
            let Some(core) = current.as_ref().filter(|core| core.remote.id() == id) else { return false };
            let wanted = if core.waking_idle.get() { Queued::Idle } else { Queued::Ready };
            core.schedule(slot, wanted);
            true
        })
        .unwrap_or(false)
}

/// Time since the simulation began, inside one.
pub(super) fn simulated_time() -> Option<Duration> {
    with_current(|core| {
        core.simulated_since.get().map(|start| core.now.get().saturating_duration_since(start))
    })
    .flatten()
}

/// Runs `f` with the current executor's core, if there is one.
pub(super) fn with_current<T>(f: impl FnOnce(&Core) -> T) -> Option<T> {
    CURRENT.try_with(|current| current.borrow().as_ref().map(|core| f(core))).ok().flatten()
}

/// Wakes the task behind `waker` so that it runs in the next pass without counting as work.
pub(super) fn wake_idle(waker: &Waker) {
    with_current(|core| core.waking_idle.set(true));
    waker.wake_by_ref();
    with_current(|core| core.waking_idle.set(false));
}

/// Adds a task to the current executor.
///
/// # Panics
/// When no executor runs on this thread.
pub fn spawn(future: impl Future<Output = ()> + 'static) {
    let task: Task = Box::pin(future);
    let Some(()) = with_current(|core| core.spawn(task)) else {
        panic!("spawn outside of a reactor: no executor runs on this thread");
    };
}

/// The time of the current pass; outside of an executor, the clock's.
pub fn now() -> Instant {
    with_current(|core| core.now.get()).unwrap_or_else(Instant::now)
}
