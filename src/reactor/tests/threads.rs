//! What crosses threads, under many thousand orders of what the threads do: wakes against falling asleep, messages, answers,
//! and either side going away. A wake that is lost leaves every thread asleep, which the explorer reports.
//!
//! The code is the real one; between any two accesses to its atomics another thread may run. Channels are one step each,
//! and memory is as the standard's sequential consistency has it: weaker orders are not explored. `SEED=n` repeats a run.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use crossbeam_channel::{Receiver, unbounded};
use shuttle::scheduler::RandomScheduler;
use shuttle::thread::{self, Thread};

use crate::reactor::atomic::explore;
use crate::reactor::executor::{self, Executor};
use crate::reactor::gate::Gate;
use crate::reactor::handle::{Counters, Message, ReactorHandle, ReactorId, Shared};
use crate::reactor::sync::{Event, Mailbox, SendError, mailbox};
use crate::reactor::{ReactorGone, yield_now};

/// Does what may let another thread run. Which executor is the current one is each thread's own.
fn apart(step: impl FnOnce()) {
    let current = executor::exchange_current(None);
    step();
    executor::exchange_current(current);
}

fn switch() {
    apart(thread::yield_now);
}

/// Runs `scene` under so many orders.
fn orders(count: usize, scene: impl Fn() + Send + Sync + 'static) {
    let fresh = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(fresh);
    println!("SEED={seed}");
    explore(Some(switch));
    let scheduler = RandomScheduler::new_from_seed(seed, count);
    let runs = shuttle::Runner::new(scheduler, shuttle::Config::new()).run(scene);
    explore(None);
    assert_eq!(runs, count);
}

/// Wakes a thread, from its sleep or out of the next one.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        apart(|| self.0.unpark());
    }
}

fn waker() -> Waker {
    Waker::from(Arc::new(Unpark(thread::current())))
}

/// Waits for a future on a thread that sleeps until it is woken.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let (waker, mut future) = (waker(), pin!(future));
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        thread::park();
    }
}

#[test]
fn each_message_arrives_once_in_its_senders_order_and_no_wake_is_lost() {
    orders(3000, || {
        // Room for less than is sent, so that senders find it full.
        let (sender, mut receiver) = mailbox::<(u8, u8)>(2);
        let senders: Vec<_> = [0, 1]
            .into_iter()
            .map(|from| {
                let sender = sender.clone();
                thread::spawn(move || {
                    for number in 0..3 {
                        let mut value = (from, number);
                        while let Err(error) = sender.send(value) {
                            let SendError::Full(back) = error else { panic!("the receiver is there") };
                            value = back;
                            thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        drop(sender);
        let mut found = [Vec::new(), Vec::new()];
        while let Some((from, number)) = wait(receiver.recv()) {
            found[usize::from(from)].push(number);
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        assert_eq!(found, [[0, 1, 2], [0, 1, 2]]);
    });
}

#[test]
fn a_claim_sees_no_change_but_its_own_and_everybody_gets_in() {
    orders(3000, || {
        // A number that claims and passes change in two steps, with others between them.
        let shared = Arc::new((Gate::default(), AtomicUsize::new(0)));
        let threads: Vec<_> = (0..3)
            .map(|who| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (gate, number) = &*shared;
                    for round in 0..2 {
                        if (who + round) % 2 == 0 {
                            let claim = wait(gate.claim(0..4));
                            let before = number.load(Ordering::SeqCst);
                            thread::yield_now();
                            assert_eq!(number.swap(before + 1, Ordering::SeqCst), before);
                            drop(claim);
                        } else {
                            let pass = gate.try_pass().unwrap_or_else(|| wait(gate.pass(3..8)));
                            thread::yield_now();
                            number.fetch_add(1, Ordering::SeqCst);
                            drop(pass);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(shared.1.load(Ordering::SeqCst), 6);
        assert!(shared.0.try_pass().is_some());
    });
}

/// Counts how often it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_receiver_that_goes_leaves_no_message_behind_and_its_sender_is_told() {
    orders(3000, || {
        let dropped = Arc::new(AtomicUsize::new(0));
        let (sender, mut receiver) = mailbox::<Counted>(8);
        let counter = Arc::clone(&dropped);
        let sending = thread::spawn(move || {
            let mut taken = 0;
            for _ in 0..4 {
                match sender.send(Counted(Arc::clone(&counter))) {
                    Ok(()) => taken += 1,
                    Err(SendError::Closed(back)) => drop(back),
                    Err(SendError::Full(_)) => panic!("there is room for all"),
                }
            }
            let closed = matches!(sender.send(Counted(counter)), Err(SendError::Closed(_)));
            (taken, closed)
        });
        let first = wait(receiver.recv());
        assert!(first.is_some());
        drop((first, receiver));
        let (taken, _) = sending.join().unwrap();
        assert!(taken >= 1);
        assert_eq!(dropped.load(Ordering::SeqCst), 5, "of those made");
    });
}

/// A reactor's loop without its ring: it sleeps when nothing is to be done, and ends once `done` says so.
struct Loop {
    executor: Executor,
    messages: Receiver<Message>,
    handle: ReactorHandle,
}

impl Loop {
    /// On the calling thread.
    fn new() -> Loop {
        let own = thread::current();
        let executor = Executor::with_kick(Box::new(move || apart(|| own.unpark())));
        let (inbox, messages) = unbounded();
        let remote = Arc::clone(executor.remote());
        let shared = Shared { id: ReactorId(0), core: 0, remote, inbox, counters: Counters::default() };
        Loop { executor, messages, handle: ReactorHandle { shared: Arc::new(shared) } }
    }

    fn run(&mut self, done: impl Fn() -> bool) {
        let _entered = self.executor.enter();
        while !done() {
            let messages = &self.messages;
            self.executor.pass_with(|| messages.try_iter().for_each(|message| message()));
            if done() || self.executor.has_ready() || self.executor.has_idle() {
                continue;
            }
            if self.executor.prepare_sleep() {
                apart(thread::park);
                self.executor.end_sleep();
            }
        }
    }
}

#[test]
fn a_reactor_that_falls_asleep_misses_no_call_and_no_wake() {
    orders(3000, || {
        let mut reactor = Loop::new();
        let callers: Vec<_> = (0..2_u32)
            .map(|number| {
                let handle = reactor.handle.clone();
                thread::spawn(move || {
                    // The second finds the reactor awake or asleep, and its answer has to wake this thread.
                    for turn in 0..2 {
                        let answer = wait(handle.call(move || async move {
                            yield_now().await;
                            number * 10 + turn
                        }));
                        assert_eq!(answer, Ok(number * 10 + turn));
                    }
                    handle.spawn(|| async {});
                })
            })
            .collect();
        // A task that waits for what other threads send, and one that it wakes on its own thread.
        let (sender, receiver) = mailbox::<u32>(4);
        let (event, sum) = (Rc::new(Event::new()), Rc::new(Cell::new(0)));
        reactor.executor.spawn(add_up(receiver, Rc::clone(&event), Rc::clone(&sum)));
        let ended = Rc::new(RefCell::new(false));
        let end = Rc::clone(&ended);
        reactor.executor.spawn(async move {
            while sum.get() < 6 {
                event.wait().await;
            }
            *end.borrow_mut() = true;
        });
        let senders: Vec<_> = [1, 5]
            .into_iter()
            .map(|value| {
                let sender = sender.clone();
                thread::spawn(move || assert_eq!(sender.send(value), Ok(())))
            })
            .collect();
        drop(sender);
        reactor.run(|| *ended.borrow());
        // The callers' work remains; the last of them says when it is done.
        let handle = reactor.handle.clone();
        let last = Arc::new(AtomicUsize::new(0));
        let (count, seen) = (Arc::clone(&last), Arc::clone(&last));
        let joiner = thread::spawn(move || {
            callers.into_iter().chain(senders).for_each(|thread| thread.join().unwrap());
            handle.spawn(move || async move {
                count.store(1, Ordering::SeqCst);
            });
        });
        reactor.run(|| seen.load(Ordering::SeqCst) == 1);
        joiner.join().unwrap();
        assert!(reactor.executor.is_empty(), "{} tasks are left", reactor.executor.len());
    });
}

async fn add_up(mut receiver: Mailbox<u32>, event: Rc<Event>, sum: Rc<Cell<u32>>) {
    while let Some(value) = receiver.recv().await {
        sum.set(sum.get() + value);
        event.notify();
    }
}

#[test]
fn calls_to_a_reactor_that_ends_are_answered_or_told_so() {
    orders(3000, || {
        let mut reactor = Loop::new();
        let callers: Vec<_> = (0..2)
            .map(|number| {
                let handle = reactor.handle.clone();
                thread::spawn(move || {
                    let answer = wait(handle.call(move || async move { number }));
                    assert!(answer == Ok(number) || answer == Err(ReactorGone), "{answer:?}");
                    let parked = wait(handle.call(std::future::pending::<()>));
                    assert_eq!(parked, Err(ReactorGone));
                })
            })
            .collect();
        // It is stopped as `Reactors` does it, at a moment that chance gives.
        let stop = Arc::new(AtomicBool::new(false));
        let (handle, stopped) = (reactor.handle.clone(), Arc::clone(&stop));
        let stopping = thread::spawn(move || {
            stopped.store(true, Ordering::SeqCst);
            handle.shared.remote.signal();
        });
        reactor.run(|| stop.load(Ordering::SeqCst));
        reactor.executor.clear();
        drop(reactor);
        callers.into_iter().chain([stopping]).for_each(|thread| thread.join().unwrap());
    });
}
