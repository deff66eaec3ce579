//! Counters against what they count: subdirectories, quotas, stored answers.

use std::collections::HashMap;

use threefs_core::ids::InodeId;

use crate::check::Checker;
use crate::protocol::Correction;
use crate::rows::{ALL_VOLUMES, REMOVED};

/// Maximum depth of nested quotas.
const NESTED_MAX: usize = 64;
const WHAT: [&str; 4] = ["bytes", "bytes of excess", "inodes", "bytes of names and attributes"];

impl Checker {
    pub(super) fn check_subdirectories(&mut self) {
        let mut expected: HashMap<InodeId, i64> = HashMap::new();
        for (id, node) in &self.inodes {
            if let Some(parent) = node.parent.filter(|it| it != id && *it != REMOVED) {
                *expected.entry(parent).or_default() += 1;
            }
        }
        let (mut findings, mut corrections) = (Vec::new(), Vec::new());
        for (id, node) in &self.inodes {
            let counted = self.subdirectories.get(id).copied().unwrap_or_default();
            let actual = expected.get(id).copied().unwrap_or_default();
            if node.parent.is_some_and(|it| it != REMOVED) && counted != actual {
                findings.push((*id, format!("counts {counted} subdirectories and has {actual}")));
                let more = actual.saturating_sub(counted);
                corrections.push(Correction::Subdirectories { directory: *id, more });
            }
        }
        self.correct_all(corrections);
        for (id, detail) in findings {
            self.add("links", id, detail);
        }
    }

    /// The use of each quota is the sum over its inodes.
    pub(super) fn check_quotas(&mut self) {
        let mut expected: HashMap<InodeId, [i64; 4]> = HashMap::new();
        let (mut findings, mut nested_too_deep) = (Vec::new(), false);
        let mut errors: HashMap<InodeId, [i64; 4]> = HashMap::new();
        for (id, node) in self.inodes.iter().filter(|(_, node)| node.charged) {
            let charges =
                [node.charged_end.saturating_sub(node.excess), node.excess, 1, node.metadata_bytes];
            let mut next = match node.quota {
                Some(quota) if quota == *id => self.quotas.get(id).and_then(|own| own.above),
                quota => quota,
            };
            for depth in 0.. {
                let Some((quota, row)) = next.and_then(|it| Some((it, self.quotas.get(&it)?)))
                else {
                    break;
                };
                if depth == NESTED_MAX {
                    nested_too_deep = true;
                    findings.push((*id, format!("is below more than {NESTED_MAX} quotas")));
                    break;
                }
                let sums = expected.entry(quota).or_default();
                for (sum, charge) in sums.iter_mut().zip(charges) {
                    *sum = sum.saturating_add(i64::try_from(charge).unwrap_or(i64::MAX));
                }
                next = row.above;
            }
        }
        for (volume, bytes) in self.history_bytes() {
            let mut next = Some(volume);
            for _ in 0..NESTED_MAX {
                let Some((quota, row)) = next.and_then(|it| Some((it, self.quotas.get(&it)?)))
                else {
                    break;
                };
                let metadata = &mut expected.entry(quota).or_default()[3];
                *metadata = metadata.saturating_add(bytes);
                next = row.above;
            }
        }
        for id in self.quotas.keys() {
            let used = self.usage.get(id).copied().unwrap_or_default();
            let sums = expected.get(id).copied().unwrap_or_default();
            if used != sums {
                let error = std::array::from_fn(|at| used[at].saturating_sub(sums[at]));
                errors.insert(*id, error);
            }
            for ((used, sum), what) in used.into_iter().zip(sums).zip(WHAT) {
                if used != sum {
                    findings.push((*id, format!("its quota counts {used} {what}, they are {sum}")));
                }
            }
        }
        for (id, detail) in findings {
            self.add("quota", id, detail);
        }
        if !nested_too_deep {
            self.correct_quotas(&errors);
        }
    }

    /// The counters of stored answers, by volume and in all, match the answers.
    pub(super) fn check_answers(&mut self) {
        let mut volumes: Vec<InodeId> =
            self.answers.keys().chain(self.answer_counters.keys()).copied().collect();
        volumes.sort_unstable();
        volumes.dedup();
        for id in volumes {
            let bytes = self.answers.get(&id).copied().unwrap_or_default();
            let counted = self.answer_counters.get(&id).copied().unwrap_or_default();
            if bytes != counted {
                let of = if id == ALL_VOLUMES { "all volumes" } else { "the volume" };
                let detail = format!("answers of {of} have {bytes} bytes and count as {counted}");
                self.add("answers", id, detail);
                let more = bytes.saturating_sub(counted);
                self.correct_all([Correction::Answers { volume: id, more }]);
            }
        }
    }
}
