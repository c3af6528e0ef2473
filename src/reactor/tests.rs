//! Tests of the executor by itself, and of running reactors.
#![forbid(unsafe_code)]

mod threads;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::sync::{Event, Semaphore, mailbox};
use super::*;

fn one_reactor() -> Reactors {
    Reactors::start(ReactorConfig::default()).expect("reactors start on the default cores")
}

#[test]
fn tasks_run_in_the_order_they_became_ready() {
    let mut executor = Executor::new();
    let log = Rc::new(RefCell::new(Vec::new()));
    for name in 0..3 {
        let log = Rc::clone(&log);
        executor.spawn(async move {
            for turn in 0..2 {
                log.borrow_mut().push((turn, name));
                yield_now().await;
            }
        });
    }
    executor.run_until_stalled();
    assert_eq!(*log.borrow(), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
    assert!(executor.is_empty());
}

#[test]
fn an_idle_task_runs_in_every_pass_and_is_not_work() {
    let mut executor = Executor::new();
    let turns = Rc::new(Cell::new(0));
    let seen = Rc::clone(&turns);
    executor.spawn(async move {
        loop {
            seen.set(seen.get() + 1);
            yield_idle().await;
        }
    });
    assert_eq!(executor.pass(), Pass { worked: 1, idled: 0 });
    for _ in 0..5 {
        assert_eq!(executor.pass(), Pass { worked: 0, idled: 1 });
    }
    assert_eq!(turns.get(), 6);
}

#[test]
fn an_idle_task_that_was_woken_between_two_passes_runs_once_in_the_next() {
    let mut executor = Executor::new();
    let waker = Rc::new(std::cell::RefCell::new(None::<std::task::Waker>));
    let shown = Rc::clone(&waker);
    executor.spawn(async move {
        poll_fn(|cx| Poll::Ready(shown.borrow_mut().replace(cx.waker().clone()))).await;
        loop {
            yield_idle().await;
        }
    });
    executor.pass();
    for _ in 0..10 {
        let before = executor.polls();
        waker.borrow().as_ref().unwrap().wake_by_ref();
        assert_eq!(executor.pass(), Pass { worked: 1, idled: 0 });
        assert_eq!(executor.pass(), Pass { worked: 0, idled: 1 });
        assert_eq!(executor.polls() - before, 2);
    }
}

#[test]
fn a_real_wake_of_an_idle_task_is_work_and_polls_it_once() {
    let mut executor = Executor::new();
    let event = Rc::new(Event::new());
    let polls = Rc::new(Cell::new(0));
    let (inner_event, inner_polls) = (Rc::clone(&event), Rc::clone(&polls));
    executor.spawn(async move {
        let mut wait = std::pin::pin!(inner_event.wait());
        loop {
            let woken = poll_fn(|cx| Poll::Ready(wait.as_mut().poll(cx).is_ready())).await;
            inner_polls.set(inner_polls.get() + 1);
            if woken {
                return;
            }
            yield_idle().await;
        }
    });
    executor.pass();
    let waker_side = Rc::clone(&event);
    executor.spawn(async move { waker_side.notify() });
    executor.pass();
    assert_eq!(executor.run_until_stalled(), 1);
    assert_eq!(polls.get(), 2);
    assert!(executor.is_empty());
}

#[test]
fn timers_fire_in_order_of_their_deadlines_and_only_when_due() {
    let mut executor = Executor::new();
    let start = executor.now();
    let log = Rc::new(RefCell::new(Vec::new()));
    for ms in [30, 10, 20, 10] {
        let log = Rc::clone(&log);
        executor.spawn(async move {
            sleep(Duration::from_millis(ms)).await;
            log.borrow_mut().push(ms);
        });
    }
    executor.run_until_stalled();
    assert_eq!(executor.next_deadline(), Some(start + Duration::from_millis(10)));
    executor.set_now(start + Duration::from_millis(9));
    assert_eq!(executor.run_until_stalled(), 0);
    executor.set_now(start + Duration::from_millis(20));
    executor.run_until_stalled();
    assert_eq!(*log.borrow(), [10, 10, 20]);
    executor.set_now(start + Duration::from_millis(30));
    executor.run_until_stalled();
    assert_eq!(*log.borrow(), [10, 10, 20, 30]);
    assert_eq!(executor.next_deadline(), None);
}

#[test]
fn a_deadline_cuts_a_future_off_and_its_timer_is_gone_when_it_does_not() {
    let mut executor = Executor::new();
    let start = executor.now();
    let late = Rc::new(Cell::new(None));
    let seen = Rc::clone(&late);
    executor.spawn(async move {
        let in_time = with_deadline(start + Duration::from_secs(5), async { 7 }).await;
        assert_eq!(in_time, Some(7));
        let never = std::future::pending::<()>();
        seen.set(Some(with_deadline(start + Duration::from_secs(1), never).await));
    });
    executor.run_until_stalled();
    assert_eq!(executor.next_deadline(), Some(start + Duration::from_secs(1)));
    executor.set_now(start + Duration::from_secs(1));
    executor.run_until_stalled();
    assert_eq!(late.get(), Some(None));
    assert_eq!(executor.next_deadline(), None);
}

#[test]
fn the_semaphore_serves_in_order_of_arrival() {
    let mut executor = Executor::new();
    let semaphore = Rc::new(Semaphore::new(3));
    let log = Rc::new(RefCell::new(Vec::new()));
    for (name, wanted) in [("first", 2), ("second", 3), ("third", 1)] {
        let (semaphore, log) = (Rc::clone(&semaphore), Rc::clone(&log));
        executor.spawn(async move {
            let permit = semaphore.acquire(wanted).await;
            log.borrow_mut().push(name);
            yield_now().await;
            drop(permit);
        });
    }
    executor.pass();
    assert_eq!(*log.borrow(), ["first"], "third must not overtake second, though its permit is free");
    executor.run_until_stalled();
    assert_eq!(*log.borrow(), ["first", "second", "third"]);
    assert_eq!(semaphore.available(), 3);
}

#[test]
fn wakes_from_other_threads_are_never_lost() {
    const COUNT: u64 = 20_000;
    let (sender, mut receiver) = mailbox::<u64>(64);
    let senders: Vec<_> = (0..2u64)
        .map(|thread| {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for number in 0..COUNT {
                    let mut value = thread * COUNT + number;
                    while let Err(sync::SendError::Full(back)) = sender.send(value) {
                        value = back;
                        std::thread::yield_now();
                    }
                }
            })
        })
        .collect();
    drop(sender);
    let sum = block_on(async move {
        let mut sum = 0;
        while let Some(value) = receiver.recv().await {
            sum += value;
        }
        sum
    });
    senders.into_iter().for_each(|thread| thread.join().expect("the sender ends"));
    assert_eq!(sum, (0..2 * COUNT).sum::<u64>());
}

#[test]
fn call_answers_from_the_reactor_thread_and_sleep_takes_its_time() {
    let reactors = one_reactor();
    let handle = reactors.handles()[0].clone();
    let core = handle.core();
    let name = block_on(handle.call(|| async { std::thread::current().name().map(str::to_owned) }));
    assert_eq!(name, Ok(Some("reactor-0".to_owned())));
    let begin = Instant::now();
    let inside = block_on(handle.call(|| async {
        sleep(Duration::from_millis(20)).await;
        current().map(|handle| handle.core())
    }));
    assert_eq!(inside, Ok(Some(core)));
    assert!(begin.elapsed() >= Duration::from_millis(20));
    reactors.shutdown();
    let gone = block_on(handle.call(|| async {}));
    assert_eq!(gone, Err(ReactorGone));
}

#[test]
fn what_waits_for_a_reactor_that_stops_is_told() {
    let reactors = one_reactor();
    let pending = reactors.handles()[0].call(std::future::pending::<()>);
    reactors.shutdown();
    assert_eq!(block_on(pending), Err(ReactorGone));
}

#[test]
fn a_core_that_cannot_be_had_is_named() {
    let config = ReactorConfig { cores: vec![1000], ..ReactorConfig::default() };
    let error = Reactors::start(config).err().expect("core 1000 does not exist here");
    assert!(error.to_string().contains("core 1000"), "{error}");
    let config = ReactorConfig { cores: vec![0, 0], ..ReactorConfig::default() };
    assert!(matches!(Reactors::start(config), Err(ReactorError::Twice { core: 0 })));
}

#[test]
fn an_idle_reactor_sleeps() {
    let reactors = one_reactor();
    let handle = reactors.handles()[0].clone();
    block_on(handle.call(|| async {})).expect("the reactor runs");
    std::thread::sleep(Duration::from_millis(20));
    let before = handle.stats();
    std::thread::sleep(Duration::from_millis(100));
    let after = handle.stats();
    assert!(after.loops - before.loops < 10, "{} loops while idle", after.loops - before.loops);
}

#[test]
fn parked_sockets_wake_when_ready_and_cost_nothing_meanwhile() {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    let reactors = one_reactor();
    let handle = reactors.handles()[0].clone();
    let (mut near, far) = UnixStream::pair().expect("a pair of sockets");
    let parked = handle.call(move || async move {
        writable(far.as_fd()).await.expect("an empty socket takes bytes");
        // Dropped while parked: the poll is cancelled, and the next one works.
        assert!(with_deadline(now(), readable(far.as_fd())).await.is_none());
        readable(far.as_fd()).await
    });
    std::thread::sleep(Duration::from_millis(30));
    let before = handle.stats();
    assert_eq!(before.in_flight, 1, "one poll is parked, the cancelled one is gone");
    std::thread::sleep(Duration::from_millis(50));
    assert!(handle.stats().enters - before.enters < 5);
    near.write_all(b"x").expect("the peer is there");
    block_on(parked).expect("the reactor lives").expect("readable");
}
