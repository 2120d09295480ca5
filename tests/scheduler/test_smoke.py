from tests.scheduler.fakes import Rig


def test_runs():
    rig = Rig()
    for i in range(5):
        rig.add("hello world" * (i + 1), id=str(i), max_tokens=50)
    rig.finish()
    rig = Rig(pages=20)
    for i in range(5):
        rig.add("hello world", id=str(i), max_tokens=50, n=2)
    rig.finish()
    print(rig.scheduler.stats())
