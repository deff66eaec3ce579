//! One rank's side of an attempt, word by word. Whole stories are in the simulator.

use super::regroup::*;
use crate::cause::CauseKind;

fn start(own: Option<usize>, roster: u64) -> Start {
    let card = format!("card of {own:?}");
    let list = format!("list {roster}");
    Start {
        id: 9,
        attempt: 2,
        own,
        size: 3,
        roster,
        list,
        epoch: own.unwrap_or(0) as u32,
        card,
        chance: 77,
    }
}

fn steps(regroup: &mut Regroup) -> Vec<Step> {
    std::iter::from_fn(|| regroup.poll()).collect()
}

fn call(attempt: u64) -> Word {
    Word::Call { roster: 5, caller: 9, attempt }
}

fn join(epoch: u32) -> Word {
    Word::Join { epoch, card: "c".into() }
}

#[test]
fn all_who_join_are_welcomed_into_an_epoch_above_every_one_before() {
    let mut coordinator = Regroup::new(start(Some(0), 5));
    let dials = [1, 2].map(|member| Step::Dial { member });
    assert_eq!(steps(&mut coordinator), dials);
    coordinator.reached(1);
    let word = call(2);
    assert_eq!(steps(&mut coordinator), [Step::Say { line: 1, word: word.clone() }]);
    coordinator.heard(1, join(9));
    let wait = Step::Say { line: 1, word: Word::Wait { member: 2 } };
    assert_eq!(steps(&mut coordinator), [wait]);
    coordinator.heard(2, join(4));
    let said = steps(&mut coordinator);
    let Some(Step::End(Ok(agreement))) = said.last() else { panic!("{said:?}") };
    assert_eq!((agreement.epoch, agreement.chance, agreement.cards.len()), (10, 77, 3));
    let mut member = Regroup::new(start(Some(2), 5));
    member.heard(3, word);
    let Step::Say { line: 1, word } = &said[0] else { panic!("{said:?}") };
    member.heard(3, word.clone());
    assert_eq!(steps(&mut member).last(), Some(&Step::End(Ok(agreement.clone()))));
}

#[test]
fn another_list_is_a_mismatch_for_everybody() {
    let mut coordinator = Regroup::new(start(Some(0), 5));
    coordinator.reached(1);
    let mut member = Regroup::new(start(Some(1), 6));
    member.heard(3, call(2));
    let Some(Step::Say { word, .. }) = member.poll() else { panic!() };
    coordinator.heard(1, word);
    let said = steps(&mut coordinator);
    let Some(Step::Say { line: 1, word: no }) = said.iter().rev().nth(1) else {
        panic!("{said:?}")
    };
    member.heard(3, no.clone());
    // Who is reached only now hears of it too.
    coordinator.reached(2);
    let late = [call(2), no.clone()];
    assert_eq!(steps(&mut coordinator), late.map(|word| Step::Say { line: 2, word }));
    let Some(Step::End(Err(why))) = member.poll() else { panic!() };
    assert_eq!((why.kind, why.member), (CauseKind::Mismatch, Some(1)));
    assert!(why.detail.contains("list 6") && why.detail.contains("list 5"));
}

#[test]
fn an_attempt_from_before_ours_ends_nothing() {
    let mut member = Regroup::new(start(Some(1), 6));
    member.heard(3, call(2));
    let died = Refusal { kind: CauseKind::PeerDied, member: Some(2), detail: "it ended".into() };
    member.heard(3, Word::No(died.clone()));
    member.lost(3, CauseKind::PeerDied, "closed");
    member.heard(4, Word::Call { roster: 6, caller: 9, attempt: 3 });
    member.heard(5, Word::Call { roster: 6, caller: 9, attempt: 3 });
    member.lost(4, CauseKind::PeerDied, "closed");
    let differs = Refusal { kind: CauseKind::Mismatch, ..died.clone() };
    member.heard(3, Word::No(differs));
    assert!(!steps(&mut member).iter().any(|step| matches!(step, Step::End(_))));
    member.heard(5, Word::No(died.clone()));
    assert_eq!(steps(&mut member), [Step::End(Err(died))]);
}

#[test]
fn who_does_not_come_is_named_on_both_sides() {
    let mut coordinator = Regroup::new(start(Some(0), 5));
    coordinator.heard(2, join(0));
    coordinator.late();
    let Some(Step::End(Err(why))) = steps(&mut coordinator).pop() else { panic!() };
    assert_eq!((why.kind, why.member), (CauseKind::TimedOut, Some(1)));
    let mut waiting = Regroup::new(start(Some(2), 5));
    waiting.heard(3, call(2));
    waiting.heard(3, Word::Wait { member: 1 });
    waiting.late();
    let Some(Step::End(Err(why))) = steps(&mut waiting).pop() else { panic!() };
    assert_eq!((why.kind, why.member), (CauseKind::TimedOut, Some(1)));
    let mut member = Regroup::new(start(Some(1), 5));
    member.late();
    let Some(Step::End(Err(why))) = member.poll() else { panic!() };
    assert_eq!((why.kind, why.member), (CauseKind::TimedOut, Some(0)));
}

#[test]
fn a_newcomer_joins_whoever_calls_and_one_alone_agrees_at_once() {
    let mut newcomer = Regroup::new(Start { size: 0, ..start(None, 0) });
    newcomer.heard(0, call(2));
    assert!(matches!(newcomer.poll(), Some(Step::Say { word: Word::Join { .. }, .. })));
    let mut alone = Regroup::new(Start { size: 1, ..start(Some(0), 5) });
    assert!(matches!(alone.poll(), Some(Step::End(Ok(_)))));
}

#[test]
fn a_call_that_was_overtaken_by_a_newer_one_is_over() {
    let mut member = Regroup::new(start(Some(1), 5));
    member.heard(4, call(2));
    assert!(matches!(member.poll(), Some(Step::Say { line: 4, word: Word::Join { .. } })));
    member.heard(3, call(1));
    let kind = CauseKind::Mismatch;
    member.heard(3, Word::No(Refusal { kind, member: Some(2), detail: "it differs".into() }));
    assert_eq!(steps(&mut member), []);
    member.heard(4, Word::Welcome { epoch: 1, chance: 7, cards: vec![] });
    assert!(matches!(member.poll(), Some(Step::End(Ok(_)))));
}
