//! Tests of one rank's side of an attempt. The simulator tests whole groups.

use super::reconfigure::*;
use crate::error::ErrorKind;

fn start(own: Option<usize>, list_digest: u64) -> Start {
    let info = format!("info of {own:?}");
    let list = format!("list {list_digest}");
    Start {
        id: 9,
        attempt: 2,
        own,
        size: 3,
        list_digest,
        list,
        epoch: own.unwrap_or(0) as u32,
        info,
        nonce: 77,
        rejected: Vec::new(),
    }
}

fn steps(reconfigure: &mut Reconfiguration) -> Vec<Step> {
    std::iter::from_fn(|| reconfigure.poll()).collect()
}

fn call(attempt: u64) -> Message {
    call_for(5, attempt)
}

fn call_for(list_digest: u64, attempt: u64) -> Message {
    Message::Call(Call { list_digest, caller: 9, attempt, rejected: Vec::new() })
}

fn join(epoch: u32) -> Message {
    Message::Join { epoch, info: "c".into() }
}

#[test]
fn all_members_join_an_epoch_above_all_previous_ones() {
    let mut coordinator = Reconfiguration::new(start(Some(0), 5));
    let dials = [1, 2].map(|member| Step::Dial { member });
    assert_eq!(steps(&mut coordinator), dials);
    coordinator.connected(1);
    let message = call(2);
    assert_eq!(steps(&mut coordinator), [Step::Send { line: 1, message: message.clone() }]);
    coordinator.received(1, join(9));
    let wait = Step::Send { line: 1, message: Message::Wait { member: 2 } };
    assert_eq!(steps(&mut coordinator), [wait]);
    coordinator.received(2, join(4));
    let next_steps = steps(&mut coordinator);
    let Some(Step::End(Ok(agreement))) = next_steps.last() else { panic!("{next_steps:?}") };
    assert_eq!((agreement.epoch, agreement.nonce, agreement.infos.len()), (10, 77, 3));
    let mut member = Reconfiguration::new(start(Some(2), 5));
    member.received(3, message);
    let Step::Send { line: 1, message } = &next_steps[0] else { panic!("{next_steps:?}") };
    member.received(3, message.clone());
    assert_eq!(steps(&mut member).last(), Some(&Step::End(Ok(agreement.clone()))));
}

#[test]
fn another_list_is_a_mismatch_for_all_members() {
    let mut coordinator = Reconfiguration::new(start(Some(0), 5));
    coordinator.connected(1);
    let mut member = Reconfiguration::new(start(Some(1), 6));
    member.received(3, call(2));
    let Some(Step::Send { message, .. }) = member.poll() else { panic!() };
    coordinator.received(1, message);
    let next_steps = steps(&mut coordinator);
    let Some(Step::Send { line: 1, message: rejection }) = next_steps.iter().rev().nth(1) else {
        panic!("{next_steps:?}")
    };
    member.received(3, rejection.clone());
    // A member that connects only now receives the rejection too.
    coordinator.connected(2);
    let timed_out = [call(2), rejection.clone()];
    assert_eq!(steps(&mut coordinator), timed_out.map(|message| Step::Send { line: 2, message }));
    let Some(Step::End(Err(why))) = member.poll() else { panic!() };
    assert_eq!((why.kind, why.member), (ErrorKind::Mismatch, Some(1)));
    assert!(why.detail.contains("list 6") && why.detail.contains("list 5"));
}

#[test]
fn messages_of_an_earlier_attempt_do_not_end_this_one() {
    let mut member = Reconfiguration::new(start(Some(1), 6));
    member.received(3, call(2));
    let died = Rejection { kind: ErrorKind::PeerDied, member: Some(2), detail: "it ended".into() };
    member.received(3, Message::Reject(died.clone()));
    member.disconnected(3, ErrorKind::PeerDied, "closed");
    member.received(4, call_for(6, 3));
    member.received(5, call_for(6, 3));
    member.disconnected(4, ErrorKind::PeerDied, "closed");
    let differs = Rejection { kind: ErrorKind::Mismatch, ..died.clone() };
    member.received(3, Message::Reject(differs));
    assert!(!steps(&mut member).iter().any(|step| matches!(step, Step::End(_))));
    member.received(5, Message::Reject(died.clone()));
    assert_eq!(steps(&mut member), [Step::End(Err(died))]);
}

#[test]
fn a_missing_member_is_named_on_both_sides() {
    let mut coordinator = Reconfiguration::new(start(Some(0), 5));
    coordinator.received(2, join(0));
    coordinator.timed_out();
    let Some(Step::End(Err(why))) = steps(&mut coordinator).pop() else { panic!() };
    assert_eq!((why.kind, why.member), (ErrorKind::TimedOut, Some(1)));
    let mut waiting = Reconfiguration::new(start(Some(2), 5));
    waiting.received(3, call(2));
    waiting.received(3, Message::Wait { member: 1 });
    waiting.timed_out();
    let Some(Step::End(Err(why))) = steps(&mut waiting).pop() else { panic!() };
    assert_eq!((why.kind, why.member), (ErrorKind::TimedOut, Some(1)));
    let mut member = Reconfiguration::new(start(Some(1), 5));
    member.timed_out();
    let Some(Step::End(Err(why))) = member.poll() else { panic!() };
    assert_eq!((why.kind, why.member), (ErrorKind::TimedOut, Some(0)));
}

#[test]
fn a_newcomer_joins_any_caller_and_a_single_member_agrees_immediately() {
    let mut newcomer = Reconfiguration::new(Start { size: 0, ..start(None, 0) });
    newcomer.received(0, call(2));
    assert!(matches!(newcomer.poll(), Some(Step::Send { message: Message::Join { .. }, .. })));
    let mut alone = Reconfiguration::new(Start { size: 1, ..start(Some(0), 5) });
    assert!(matches!(alone.poll(), Some(Step::End(Ok(_)))));
}

#[test]
fn a_call_ends_when_a_newer_one_arrives() {
    let mut member = Reconfiguration::new(start(Some(1), 5));
    member.received(4, call(2));
    assert!(matches!(member.poll(), Some(Step::Send { line: 4, message: Message::Join { .. } })));
    member.received(3, call(1));
    let kind = ErrorKind::Mismatch;
    member.received(
        3,
        Message::Reject(Rejection { kind, member: Some(2), detail: "it differs".into() }),
    );
    assert_eq!(steps(&mut member), []);
    member.received(4, Message::Welcome { epoch: 1, nonce: 7, infos: vec![] });
    assert!(matches!(member.poll(), Some(Step::End(Ok(_)))));
}

#[test]
fn a_member_with_a_rejected_list_fails_with_its_reason_and_keeps_the_next_call() {
    let died = Rejection { kind: ErrorKind::PeerDied, member: Some(2), detail: "it ended".into() };
    let rejected = vec![RejectedList { list_digest: 6, why: died.clone() }];
    let call = Call { list_digest: 5, caller: 9, attempt: 3, rejected: rejected.clone() };
    let mut coordinator = Reconfiguration::new(Start { attempt: 3, rejected, ..start(Some(0), 5) });
    coordinator.connected(1);
    let called = Step::Send { line: 1, message: Message::Call(call.clone()) };
    assert_eq!(steps(&mut coordinator).last(), Some(&called));
    // Before and after the call with its list.
    for joined in [false, true] {
        let mut member = Reconfiguration::new(start(Some(1), 6));
        if joined {
            member.received(3, call_for(6, 2));
            assert!(matches!(member.poll(), Some(Step::Send { line: 3, .. })));
        }
        member.received(4, Message::Call(call.clone()));
        let ends = [Step::Keep { line: 4, call: call.clone() }, Step::End(Err(died.clone()))];
        assert_eq!(steps(&mut member), ends);
    }
    // A member that has the list of the call joins, whatever was rejected.
    let mut member = Reconfiguration::new(start(Some(1), 5));
    member.received(4, Message::Call(call));
    assert!(matches!(member.poll(), Some(Step::Send { message: Message::Join { .. }, .. })));
}

#[test]
fn details_of_a_rejection_are_bounded() {
    let mut coordinator = Reconfiguration::new(start(Some(0), 5));
    coordinator.received(1, Message::Differ { list: "é".repeat(1 << 20) });
    let Some(Step::End(Err(why))) = steps(&mut coordinator).pop() else { panic!() };
    assert!(why.detail.starts_with("it was given é") && why.detail.len() <= 4096);
}
