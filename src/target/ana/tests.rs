//! States, permits and the log.
#![forbid(unsafe_code)]

use super::*;
use crate::device::{Device, OpenOptions};
use crate::target::namespace::Backend;
use crate::target::spec::NamespaceSpec;

fn namespace(nsid: u32, group: u32) -> Arc<Namespace> {
    let device = Device::open("ram:1MiB", OpenOptions::default()).expect("a ram device");
    let spec = NamespaceSpec { ana_group: Some(group), ..NamespaceSpec::new(Backend::Device(device), "ram") };
    Arc::new(Namespace::new(nsid, spec).expect("a namespace"))
}

fn map(namespaces: &[(u32, u32)]) -> NamespaceMap {
    let mut map = NamespaceMap::default();
    for &(nsid, group) in namespaces {
        map.insert(namespace(nsid, group));
    }
    map
}

fn held(access: &Access, group: Option<u32>) -> usize {
    access.withdrawn(group).len()
}

#[test]
fn a_withdrawn_permit_lives_as_long_as_what_runs_with_it() {
    let access = Access::default();
    let map = map(&[(1, 1), (2, 2)]);
    let paths = access.reach(&map);
    let running = paths[0].clone();
    assert!(access.set(Some(1), AnaState::Inaccessible));
    assert_eq!((held(&access, Some(1)), held(&access, Some(2)), held(&access, None)), (1, 0, 1));
    drop(paths);
    assert_eq!(held(&access, Some(1)), 1, "a command runs");
    let now = access.reach(&map);
    assert_eq!(now[0].as_ref().unwrap().refusal, Some(Status::ANA_INACCESSIBLE));
    assert_eq!(now[1].as_ref().unwrap().refusal, None);
    // Open again before the command has ended: that one is still waited for, and no new one with it.
    assert!(access.set(Some(1), AnaState::NonOptimized));
    assert!(!access.set(Some(1), AnaState::NonOptimized), "nothing new");
    let _later = access.reach(&map);
    assert_eq!(held(&access, None), 1);
    drop(running);
    assert_eq!(held(&access, None), 0);
}

#[test]
fn a_command_that_waits_is_judged_by_what_its_queue_has_now() {
    let access = Access::default();
    let both = map(&[(1, 1), (2, 1)]);
    let before = access.reach(&both);
    let verdict = |path: &[Option<NamespaceRef>], now: &[Option<NamespaceRef>]| {
        path[0].as_ref().unwrap().verdict(now.first().and_then(Option::as_deref))
    };
    assert_eq!(verdict(&before, &access.reach(&both)), None);
    access.set(None, AnaState::NonOptimized);
    assert_eq!(verdict(&before, &access.reach(&both)), None, "commands go on to run");
    access.set(None, AnaState::PersistentLoss);
    assert_eq!(verdict(&before, &access.reach(&both)), Some(Status::ANA_PERSISTENT_LOSS));
    access.set(None, AnaState::Optimized);
    let after = access.reach(&both);
    assert_eq!(verdict(&before, &after), Some(Status::ANA_TRANSITION), "it was forbidden meanwhile");
    assert_eq!(verdict(&after, &access.reach(&both)), None);
    let mut without = both.clone();
    without.remove(1);
    assert_eq!(verdict(&after, &access.reach(&without)), Some(Status::INVALID_NAMESPACE.with_dnr()));
    without.insert(namespace(1, 1));
    let other = Some(Status::INVALID_NAMESPACE.with_dnr());
    assert_eq!(verdict(&after, &access.reach(&without)), other, "another namespace of that NSID");
}

#[test]
fn the_log_has_every_namespace_once_and_counts_changes() {
    let access = Access::default();
    let map = map(&[(1, 7), (2, 3), (3, 7)]);
    access.set(Some(7), AnaState::Inaccessible);
    access.set(None, AnaState::Inaccessible);
    access.set(Some(3), AnaState::Change);
    let page = access.log(&map, false, 3);
    let mut expected = vec![3, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
    // Group 3: one namespace, changed third, in transition.
    expected.extend([3, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0x0F]);
    expected.extend([0; 15]);
    expected.extend([2, 0, 0, 0]);
    // Group 7: two, changed first.
    expected.extend([7, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x03]);
    expected.extend([0; 15]);
    expected.extend([1, 0, 0, 0, 3, 0, 0, 0]);
    // As long as three groups of one would be.
    expected.resize(16 + 3 * 36, 0);
    assert_eq!(page, expected);
    let groups = access.log(&map, true, 3);
    assert!(groups[16 + 2 * 32..].iter().all(|&byte| byte == 0));
    assert_eq!((groups[20], groups[52]), (0, 0), "no namespaces");
    access.touch(7);
    let page = access.log(&map, true, 3);
    assert_eq!((page[0], page[24], page[56]), (4, 3, 4));
}

#[test]
fn what_lies_with_a_namespace_is_not_reached_where_it_is_not() {
    for state in AnaState::ALL {
        assert_eq!(AnaState::from_name(state.name()), Some(state));
        for sets in [false, true] {
            let refused = |feature| check_feature(state, feature, sets).is_err();
            assert_eq!(refused(fid::RESERVATION_PERSISTENCE), !state.is_accessible());
            assert_eq!(refused(fid::NUMBER_OF_QUEUES), sets && state == AnaState::PersistentLoss);
        }
    }
}
