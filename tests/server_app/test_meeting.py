"""Which nodes a run shows to its strategy, and what is wrong with the others."""

from uuid import uuid4

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from rounds import LoopbackGrid

from isoloco_flwr.fields import SettingsError
from server_app.sites import Sites, SitesNotReadyError


class Nodes(LoopbackGrid):
    """Nodes that say what they are, registered in the order of their ids."""

    def __init__(self, **answers):
        super().__init__(0)
        self.answers = {int(name[1:]): answer for name, answer in answers.items()}
        self.sent = []
        self.starts = 1

    def get_nodes(self):
        return [
            NodeInfo(
                node_id=node_id,
                registered_at=f"2026-01-01T00:00:00.{node_id:06d}",
                last_activated_at=f"2026-01-02T00:00:00.{self.starts:06d}",
            )
            for node_id in sorted(self.answers)
        ]

    def push_messages(self, messages):
        self.sent += messages
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self._waiting[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids):
        replies = []
        for message_id in message_ids:
            message = self._waiting[message_id]
            answer = self.answers.get(message.metadata.dst_node_id)
            if answer is not None:
                del self._waiting[message_id]
                replies.append(made_of(answer, message))
        return replies


def made_of(answer, message):
    if isinstance(answer, Error):
        return Message(error=answer, reply_to=message)
    place, places, *free = answer
    record = ConfigRecord(
        {
            "partition-id": place,
            "num-partitions": places,
            "device": "cpu",
            "threads": 1,
            "disk": "one",
            "state-bytes": 100,
            "free-bytes": free[0] if free else 1000,
        }
    )
    return Message(RecordDict({"worker": record}), reply_to=message)


def ids(sites):
    return list(sites.get_node_ids())


@pytest.fixture
def flower_log(caplog):
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def test_nodes_are_numbered_by_place_whenever_they_registered():
    sites = Sites(Nodes(n1=(2, 3), n2=(0, 3), n3=(1, 3)), min_sites=0)
    assert sites.meet() == 3
    assert ids(sites) == [2, 3, 1]
    by_registration = sorted(sites.get_nodes(), key=lambda node: node.registered_at)
    assert [node.node_id for node in by_registration] == [2, 3, 1]


def test_enough_sites_start_and_the_others_join(flower_log):
    nodes = Nodes(n1=(0, 3), n2=None, n3=(2, 3))
    sites = Sites(nodes, min_sites=2)
    assert sites.meet() == 3
    assert ids(sites) == [1, 3]
    nodes.answers[2] = (1, 3)
    assert ids(sites) == [1, 2, 3]
    assert "Site 1 is here as node 2, on cpu" in flower_log()
    assert len(nodes.sent) == 3  # each is asked once


def test_a_site_that_was_restarted_has_its_place_and_the_old_node_is_asked_no_more(flower_log):
    nodes = Nodes(n1=(0, 2), n2=(1, 2))
    sites = Sites(nodes, min_sites=1)
    sites.meet()
    nodes.answers[3] = (0, 2)
    assert ids(sites) == [3, 2]
    assert "Site 0 is back as node 3" in flower_log()


def test_a_site_that_was_restarted_as_the_same_node_is_asked_anew(flower_log):
    nodes = Nodes(n1=(0, 2))
    sites = Sites(nodes, min_sites=1)
    sites.meet()
    nodes.starts, nodes.answers[1] = 2, None
    assert ids(sites) == []
    nodes.answers[1] = (0, 2)
    assert ids(sites) == [1]
    assert "Site 0 is back as node 1" in flower_log()
    assert len(nodes.sent) == 2


def test_a_site_that_is_restarted_before_all_are_there_is_not_taken_for_two():
    class Restarted(Nodes):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            if self.starts == 1:
                self.starts, self.answers[2] = 2, (1, 2)
            return replies

    sites = Sites(Restarted(n1=(0, 2), n2=None), min_sites=0)
    assert sites.meet() == 2
    assert ids(sites) == [1, 2]


def test_a_site_that_goes_and_comes_is_in_the_log(flower_log):
    nodes = Nodes(n1=(0, 2), n2=(1, 2))
    sites = Sites(nodes, min_sites=1)
    sites.meet()
    answer = nodes.answers.pop(2)
    assert ids(sites) == [1]
    assert "Site 1 is gone (node 2)" in flower_log()
    nodes.answers[2] = answer
    assert ids(sites) == [1, 2]
    assert "Site 1 is back (node 2)" in flower_log()


def test_who_has_not_answered_is_in_the_log(flower_log):
    nodes = Nodes(n1=(0, 2), n2=(1, 2))
    sites = Sites(nodes, min_sites=1)
    sites.meet()
    nodes.answers[2] = None
    for _ in range(2):
        round_messages = [
            Message(RecordDict(), dst_node_id=node_id, message_type="train") for node_id in (1, 2)
        ]
        nodes.answers[1] = (0, 2)
        list(sites.pull_messages(sites.push_messages(round_messages)))
    assert flower_log().count("Site 1 has not answered in time") == 1
    assert "Site 0 has not" not in flower_log()


def test_a_site_whose_message_has_expired_is_late_and_one_that_fails_has_an_error(flower_log):
    nodes = Nodes(n1=(0, 2), n2=(1, 2))
    sites = Sites(nodes, min_sites=1)
    sites.meet()
    nodes.answers[1] = Error(ErrorCode.MESSAGE_UNAVAILABLE, "Message Unavailable")
    nodes.answers[2] = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "Traceback\nno room")
    messages = [
        Message(RecordDict(), dst_node_id=node_id, message_type="train") for node_id in (1, 2)
    ]
    assert len(list(sites.pull_messages(sites.push_messages(messages)))) == 2
    assert "Site 0 has not answered in time" in flower_log()
    assert "Site 1 has an error: no room" in flower_log()


PROBLEMS = {
    "both have partition-id 0": {"n1": (0, 2), "n2": (0, 2)},
    "has num-partitions 3, others have 2": {"n1": (0, 2), "n2": (1, 3)},
    "node 2 is not ready: no text there": {
        "n1": (0, 2),
        "n2": Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "Traceback\nno text there"),
    },
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_with_all_needed_a_problem_ends_the_run(problem):
    with pytest.raises(SitesNotReadyError, match=problem):
        Sites(Nodes(**PROBLEMS[problem]), min_sites=0).meet()


@pytest.mark.parametrize("problem", PROBLEMS)
def test_with_fewer_needed_a_problem_is_in_the_log(problem, flower_log):
    sites = Sites(Nodes(**PROBLEMS[problem]), min_sites=1)
    assert sites.meet() == 2
    assert problem in flower_log()
    assert len(ids(sites)) == 1


def test_a_node_that_the_superlink_says_is_gone_is_no_problem():
    gone = Error(ErrorCode.NODE_UNAVAILABLE, "Node unavailable")
    sites = Sites(Nodes(n1=gone, n2=(0, 1)), min_sites=0)
    assert sites.meet() == 1
    assert ids(sites) == [2]


def test_more_sites_than_there_are_places_are_refused():
    with pytest.raises(SettingsError, match="min-sites = 3: allowed is at most 2"):
        Sites(Nodes(n1=(0, 2), n2=(1, 2)), min_sites=3).meet()


def test_a_disk_without_room_for_all_its_workers_is_refused():
    with pytest.raises(SitesNotReadyError, match="states of workers 0, 1 take up to"):
        Sites(Nodes(n1=(0, 2, 150), n2=(1, 2, 150)), min_sites=0).meet()
